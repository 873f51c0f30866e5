"""`python -m eval`: the command line, with `--short` for the short form."""

import sys

from eval.cli import app

if __name__ == "__main__":
    if sys.argv[1:] == ["--short"]:
        sys.argv[1:] = ["run", "--plan", "short"]
    app()
