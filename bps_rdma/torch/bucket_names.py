# SPDX-License-Identifier: Apache-2.0
"""Names for the buckets of torch's DDP whose hook has no HookState, the same on all ranks.

A name says what a bucket consists of: buckets that differ never meet. Those of two models that are alike would, in the
order of the calls, which may differ between ranks. Such a second model is refused.
"""

import hashlib
import weakref
from typing import Any, NamedTuple

from torch.utils.weak import WeakIdKeyDictionary

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError


class _Model:
    """Parameters that have come together; only they keep it alive."""

    def __init__(self) -> None:
        self.following = 0  # the index of the bucket that comes next in its pass; 0 after the last one
        self.is_mixed = False  # perhaps it is two models, of one backward pass


class _Owner(NamedTuple):
    model: weakref.ref[_Model]
    parameters: tuple[int, ...]


class _Names:
    outlives_view = True  # models that have the names stay

    def __init__(self) -> None:
        self._model_of: Any = WeakIdKeyDictionary()  # parameter -> _Model
        self._recent: list[weakref.ref[_Model]] = []  # models in their pass, the last one to have a bucket last
        self._owners: dict[str, _Owner] = {}  # by name

    def of(self, bucket: Any, group: int) -> str:
        parameters = bucket.parameters()
        shapes = repr([(tuple(each.shape), str(each.dtype)) for each in parameters])
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        name = f"ddp bucket {bucket.index()}{' and last' * bucket.is_last()}, {len(parameters)} parameters, {digest}"
        model = self._model(bucket, parameters)
        own = _Owner(weakref.ref(model), tuple(map(id, parameters)))
        owner = self._owners.setdefault(f"{group} {name}", own)
        before = owner.model()
        if before is not None and owner.parameters != own.parameters and (before is not model or model.is_mixed):
            raise InvalidArgumentError(
                f"two models have the bucket {name!r}, which ranks could send in different orders",
                "pass bps_rdma.torch.HookState(group) to register_comm_hook(), one for each model",
            )
        self._owners[f"{group} {name}"] = own
        return name

    def _model(self, bucket: Any, parameters: list[Any]) -> _Model:
        known: list[_Model] = [one for each in parameters if (one := self._model_of.get(each)) is not None]
        recent = [one for ref in self._recent if (one := ref()) is not None]
        if known:
            model = known[0]
        else:  # buckets of a pass come in the order of their indices
            waiting = [each for each in recent if bucket.index() and each.following == bucket.index()]
            model = waiting[-1] if waiting else _Model()
        for other in known:
            other.is_mixed |= len(set(known)) > 1
        model.following = 0 if bucket.is_last() else bucket.index() + 1
        for each in parameters:
            self._model_of[each] = model
        self._recent = [weakref.ref(each) for each in recent if each is not model and each.following]
        if model.following:
            self._recent.append(weakref.ref(model))
        return model


def name_of(bucket: Any, group: int) -> str:
    """The name of a bucket in the group of this number.

    Raises:
        InvalidArgumentError: another model, which still exists, has one of this name.
    """
    return job.current().part(_Names).of(bucket, group)
