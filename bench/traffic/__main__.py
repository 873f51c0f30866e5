"""`python -m bench.traffic`: the same as `hypic bench traffic`."""

from bench.traffic.command import app

if __name__ == "__main__":
    app(prog_name="hypic bench traffic")
