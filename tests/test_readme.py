"""The README's examples run, and its two commands are there."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run(capsys):
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["solution"].converged.all()
    assert namespace["linear"].weight.grad.norm() > 0
    assert namespace["output"].shape == (4, 128, 80)
    assert "tensor([[0." in capsys.readouterr().out


def test_the_two_commands_come_first():
    first, second = re.findall(r"```sh\n(.*?)\n```", README)[:2]
    assert first.endswith(".venv/bin/fixpoint compare")
    assert second.endswith(".venv/bin/pytest")
