"""Lightning's Trainer: takes plain DataLoaders, prepares them, and has the prepared ones wrapped."""

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader

# Lightning is installed under two package names with separate classes: take the one that the program has imported.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_NAME = next((name for name in _NAMES if name in sys.modules), _NAMES[0])
_Callback: Any = import_module(f"{_NAME}.callbacks").Callback


class StreamLoaders(_Callback):  # type: ignore[misc]
    """Wraps each loader of a Trainer in a ``StreamedLoader``, once the Trainer has prepared it.

    A Trainer replaces the sampler of a ``DataLoader``, for its rank or for ``overfit_batches``, and leaves other loaders as
    they are: so loaders are wrapped after that. The Trainer restores no loader state when a run is resumed at the start of an
    epoch, so this callback calls ``set_epoch`` at each epoch, also on a ``StreamedLoader`` that the user gave to the Trainer.

    Args:
        train: Stages for training. Left out: training loaders are not wrapped.
        validate: Stages for validation, within training too. Left out: as for ``train``.
        test: Stages for testing. Left out: as for ``train``.
        **settings: Further arguments of ``StreamedLoader`` for all loaders: ``depth``, ``seed``, ``feed`` …

    Example:
        ``Trainer(callbacks=[StreamLoaders(train=[augment], validate=[normalize])])``
    """

    def __init__(
        self,
        train: Sequence[Any] | None = None,
        validate: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        self._stages = {"train": train, "validate": validate, "test": test}
        self._settings = settings
        self._training: weakref.WeakSet[StreamedLoader] = weakref.WeakSet()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap each loader after the strategy has processed it."""
        strategy = trainer.strategy
        vars(strategy).pop("process_dataloader", None)  # left by an interrupted run
        strategy.process_dataloader = partial(self._wrapped, trainer, strategy.process_dataloader)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the strategy's own method."""
        vars(trainer.strategy).pop("process_dataloader", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch of a resumed run, also if its checkpoint is of the last batch of the epoch before."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Key the draws by this epoch."""
        for loader in self._training:
            loader.set_epoch(trainer.current_epoch)

    def _wrapped(self, trainer: Any, process: Any, loader: Any) -> Any:
        loader = process(loader)
        kind = "train" if trainer.training else "test" if trainer.testing else "validate"
        stages = None if trainer.predicting else self._stages[kind]
        if stages is not None and not isinstance(loader, StreamedLoader):
            loader = StreamedLoader(loader, stages, **{"device": trainer.strategy.root_device, **self._settings})
        if kind == "train" and isinstance(loader, StreamedLoader):
            self._training.add(loader)
        return loader
