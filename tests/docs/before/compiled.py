# SPDX-License-Identifier: Apache-2.0
"""The same as training.py. The compiler traces the model and generates no code, which would take a minute."""

import functools
from pathlib import Path

import torch

exec(Path(__file__).with_name("training.py").read_text())
torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
