# SPDX-License-Identifier: Apache-2.0
"""Tells a hook about the backward that it runs in: whether it adds to .grad of parameters, and when it ends.

A backward may run inside another one, when activations are checkpointed with use_reentrant=True. Its end is no end for
us: the outer one may still compute gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bps_rdma.errors import BpsError


class EndOfBackward:
    """Calls a method once at the end of the outermost backward, however often it is asked to while that runs.

    Args:
        call: a method of the owner of this object.
        fail: a method that is called instead where the backward fails, and also after `call` has raised something.
    """

    def __init__(self, call: Callable[[], None], fail: Callable[[], None]) -> None:
        self._call, self._fail = weakref.WeakMethod(call), weakref.WeakMethod(fail)
        self._asked: weakref.ref[_Ending] | None = None  # only the backward holds it: one that fails drops it

    @property
    def is_due(self) -> bool:
        """True if the running backward will make the call."""
        return self._asked is not None and self._asked() is not None

    def ask(self) -> None:
        """To be called by a hook: this backward makes the call at its end, if it does not fail.

        Raises:
            BpsError: the backward is a compiled one.
        """
        if not self.is_due:
            compiled = sys.modules.get("torch._dynamo.compiled_autograd")
            if getattr(compiled, "in_compiled_autograd_region", False):  # it calls what is queued before its end
                raise BpsError(
                    "backward() runs by compiled autograd, where gradients cannot be averaged",
                    "turn it off: torch._dynamo.config.compiled_autograd = False; torch.compile() of the model works",
                )
            ending = _Ending(self._end)
            self._asked = weakref.ref(ending, self._dropped)
            ending.queue()

    def forget(self) -> None:
        """What a failed backward has left does not count; it may have left even what waits for its end."""
        if self.is_due and torch._C._current_graph_task_id() == -1:  # a hook may call this before the end
            self._dropped()
        self._asked = None

    def _end(self) -> None:
        try:
            self._asked = None
            call = self._call()
            if call is not None:
                call()
        except BaseException:
            self._dropped()
            raise

    def _dropped(self, _: object = None) -> None:
        self._asked = None
        fail = self._fail()
        if fail is not None:
            fail()


class _Ending:
    """Waits for the end of one backward after the other, from the innermost outwards."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._hook: Any = None

    def queue(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        node: Any = torch._C._current_autograd_node()  # the node of the outer backward, which computes this one
        if node is None:
            self._end()
            return
        # A backward that contains others is a whole one, so what follows this node is computed in any case.
        following = next(each for each, _ in node.next_functions if each is not None)
        self._hook = following.register_prehook(self._in_outer)

    def _in_outer(self, _: Any) -> None:
        self._hook.remove()
        self._hook = None
        self.queue()


def adds_to(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Returns whether the running backward adds to .grad of a parameter, or is a whole one that could have.

    A gradient that is only returned, as by torch.autograd.grad(), is added nowhere. A whole backward is one without
    `inputs`: it may reach the parameters by a backward inside of it, or pass them by, where another rank's reaches
    them. To be called by a hook of a tensor that was computed from the parameters.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # within torch.func.grad(), which returns gradients
        return False
    trains = False
    for parameter in parameters:
        if parameter.requires_grad:
            trains = True
            if _is_computed(torch.autograd.graph.get_gradient_edge(parameter).node):
                return True
    return trains and _is_whole(torch._C._current_autograd_node())


def returned_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns those whose gradients the running backward returns, as torch.autograd.grad() does.

    Within torch.func.grad() these are all: it returns gradients of the tensors that stand for parameters. To be called
    by a hook of a tensor that was computed from the parameters, or from such tensors.
    """
    trained = (each for each in parameters if each.requires_grad)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return list(trained)
    return [each for each in trained if _is_returned(torch.autograd.graph.get_gradient_edge(each).node)]


def _is_whole(node: Any) -> bool:
    """Returns whether everything that `node` was computed from gets a gradient in this backward."""
    seen, left = {node}, [node]
    while left:
        following = {each for each, _ in left.pop().next_functions if each is not None} - seen
        if not all(_is_computed(each) for each in following):
            return False
        seen |= following
        left.extend(following)
    return True


def _is_computed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient is returned
        return False


def _is_returned(node: Any) -> bool:
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False
