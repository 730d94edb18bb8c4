"""On a machine with a GPU, whose driver is asked anew in each process, `simulate()` has a way out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import crosscurrent

_SIMULATED_RACE = """\
import torch, crosscurrent
with crosscurrent.simulate(), crosscurrent.watch() as watch:
    values = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        values.sum()
print(len(watch.findings), torch.cuda.is_available())
"""


def test_devices_can_be_hidden_and_then_simulated() -> None:
    """Where there is no GPU, the same command must work as well."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _SIMULATED_RACE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "1 False\n", ran.stderr


@pytest.mark.gpu
def test_a_real_device_is_refused_before_and_after_its_first_use() -> None:
    refusal = r"CUDA_VISIBLE_DEVICES= |CUDA is in use in this process"
    with pytest.raises(RuntimeError, match=refusal), crosscurrent.simulate():
        pass
    torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA is in use in this process"), crosscurrent.simulate():
        pass
