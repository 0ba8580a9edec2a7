"""Lightning's Trainer: it is given DataLoaders, and what it has made of them is wrapped."""

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader

# The package has two names, with classes of their own: that which the program has imported.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_NAME = next((name for name in _NAMES if name in sys.modules), _NAMES[0])
_Callback: Any = import_module(f"{_NAME}.callbacks").Callback


class StreamLoaders(_Callback):  # type: ignore[misc]
    """Wraps each loader of a Trainer in a ``StreamedLoader``, once the Trainer has prepared it.

    A Trainer gives a ``DataLoader`` the sampler of its rank, or of ``overfit_batches``, and leaves other loaders as they are. A
    run that is resumed at the beginning of an epoch gets no state of its loaders, so this tells them each epoch. That goes for
    a ``StreamedLoader`` that was given to the Trainer, too.

    Args:
        train: The stages of training. Left out: its loaders are not wrapped.
        validate: Those of validation, within training too.
        test: Those of testing.
        **settings: Others of ``StreamedLoader``, of all loaders: ``depth``, ``seed``, ``feed`` …

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
        """Have what the strategy makes of a loader wrapped."""
        strategy = trainer.strategy
        vars(strategy).pop("process_dataloader", None)  # of a run that was interrupted
        strategy.process_dataloader = partial(self._wrapped, trainer, strategy.process_dataloader)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the strategy as it was."""
        vars(trainer.strategy).pop("process_dataloader", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have a resumed run begin with its epoch, also where its state is of the last batch of the one before."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Have draws be those of this epoch."""
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
