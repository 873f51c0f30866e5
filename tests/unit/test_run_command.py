"""`hypic run` ends with one line on what it cannot serve."""

import shutil
from pathlib import Path

from typer.testing import CliRunner

from services.cli.main import app

DEMO = Path("models/demo")


def test_a_template_that_drops_the_question(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(DEMO, tmp_path / "checkpoint"))
    (directory / "chat_template.jinja").write_text("nothing of it")
    result = CliRunner().invoke(app, ["run", "Who?", "--checkpoint", str(directory)])
    assert result.exit_code == 2
    assert result.output.startswith("hypic run: the chat template alters, drops")
    assert result.output.count("\n") == 1
