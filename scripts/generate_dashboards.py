"""Writes the Grafana dashboards of deploy/monitoring. With --check: fails when they are out of date.

A dashboard is a list of rows, a row a list of panels; places, ids and what all panels have in common are filled in here.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dashboards.operator import OPERATOR
from dashboards.overview import OVERVIEW
from dashboards.panels import Dashboard, Panel

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "monitoring" / "dashboards"
_COLUMNS = 24
_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def build(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's JSON."""
    return {
        "uid": f"hypic-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["hypic"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(_panels(dashboard), 1)],
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    top = 0
    for row in dashboard.rows:
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top},
        }
        top, left = top + 1, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left = top + _HEIGHT, 0
            yield _panel(panel) | {"gridPos": {"h": _HEIGHT, "w": panel.width, "x": left, "y": top}}
            left += panel.width
        top += _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    is_heat_map = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query,
            "legendFormat": legend,
            "format": "heatmap" if is_heat_map else "time_series",
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    common = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "targets": targets,
    }
    if is_heat_map:
        return common | {"options": {"calculate": False, "yAxis": {"unit": panel.unit}}}
    drawn = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {"fillOpacity": 0}
    return common | {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def main() -> None:
    """Parse the arguments and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for dashboard in (OVERVIEW, OPERATOR):
        path, content = FOLDER / f"{dashboard.name}.json", json.dumps(build(dashboard), indent=1) + "\n"
        if not is_check:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            sys.exit(f"{path.name} is out of date: run `python scripts/generate_dashboards.py`")


if __name__ == "__main__":
    main()
