"""What all commands have in common: usage, exit status, where output goes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import conduit
from conduit.__main__ import COMMANDS, main

Refused = Callable[..., str]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"conduit {conduit.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.words, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_wrong_words_are_refused(refused: Refused) -> None:
    assert "COMMAND" in refused()
    assert "conduit bench --help" in refused("bench")
    assert "bench" in refused("frobnicate")
    assert "--schema" in refused("bench", "sample")
    assert "at least 1, got '0'" in refused("bench", "sample", "--schema", "mujoco", "--rows", "0")
    assert "'x'" in refused("bench", "sample", "--schema", "mujoco", "--batch", "1,x")
    assert "--json" in refused("bench", "sample", "--schema", "mujoco", "--json", "/no/such/file")


def test_wrong_schemas_are_refused(refused: Refused, tmp_path: Path) -> None:
    assert "jagged" in refused("bench", "sample", "--schema", "tokens")
    assert "mujoco, atari or a file" in refused("bench", "sample", "--schema", "nope")
    path = tmp_path / "schema.json"
    path.write_text('{"observation": 1}')
    assert "Schema.description" in refused("bench", "delivery", "--schema", str(path))


def test_only_the_json_object_goes_to_standard_output(
    launched: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    words = "bench sample --schema mujoco --rows 2000 --batch 8 --rounds 2 --round-ms 1 --json -"
    done = launched(*words.split())
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"] == "bench sample"
    assert document["args"]["rows"] == 2000


def test_an_error_in_a_fresh_process_is_one_line(
    launched: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = launched("bench", "sample", "--schema", "nope")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("conduit: ") and done.stderr.count("\n") == 1
