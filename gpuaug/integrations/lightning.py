"""Callback for Lightning's Trainer that wraps the DataLoaders that the Trainer has prepared."""

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader

# Lightning has two packages with separate classes. The package that the program has imported is used.
_PACKAGE_NAMES = ("lightning.pytorch", "pytorch_lightning")
_PACKAGE_NAME = next((name for name in _PACKAGE_NAMES if name in sys.modules), _PACKAGE_NAMES[0])
_Callback: Any = import_module(f"{_PACKAGE_NAME}.callbacks").Callback


class StreamLoaders(_Callback):  # type: ignore[misc]
    """Wrap each loader of a Trainer in a ``StreamedLoader`` after the Trainer has prepared it.

    A Trainer replaces the sampler of a ``torch.utils.data.DataLoader``, for the rank or for ``overfit_batches``, but not of
    loaders of other classes. So a loader must be wrapped after the Trainer has replaced its sampler, which this callback does.

    When a run is resumed at the start of an epoch, the Trainer restores no state of a loader. So this callback calls
    ``set_epoch`` of each training loader at the start of each epoch, also if the user has wrapped the loader.

    Args:
        train: Stages for training. ``None``: training loaders are not wrapped.
        validate: Stages for validation, including validation during ``fit``. ``None``: validation loaders are not wrapped.
        test: Stages for testing. ``None``: test loaders are not wrapped.
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
        """Replace ``strategy.process_dataloader`` by a function that also wraps each loader."""
        strategy = trainer.strategy
        vars(strategy).pop("process_dataloader", None)  # left by a run that was interrupted before teardown
        strategy.process_dataloader = partial(self._process_and_wrap, trainer, strategy.process_dataloader)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore ``strategy.process_dataloader``."""
        vars(trainer.strategy).pop("process_dataloader", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch of a resumed run.

        The Trainer does not call ``on_train_epoch_start`` first if the checkpoint is from within an epoch, or from its last
        batch.
        """
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch of the training loaders. Their random numbers depend on the epoch."""
        for loader in self._training:
            loader.set_epoch(trainer.current_epoch)

    def _process_and_wrap(self, trainer: Any, process: Any, loader: Any) -> Any:
        loader = process(loader)
        phase = "train" if trainer.training else "test" if trainer.testing else "validate"
        stages = None if trainer.predicting else self._stages[phase]
        if stages is not None and not isinstance(loader, StreamedLoader):
            loader = StreamedLoader(loader, stages, **{"device": trainer.strategy.root_device, **self._settings})
        if phase == "train" and isinstance(loader, StreamedLoader):
            self._training.add(loader)
        return loader
