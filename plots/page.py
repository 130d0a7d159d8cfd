"""A page to explore learning curves: one file, which works without a server and fetches nothing.

`plots/curves.py --html` writes it. Legend entries switch lines on and off, the menus choose the
axis, the band, the panel and whether single runs show. Plotly draws; all numbers are in the page.
"""

import json
from html import escape
from pathlib import Path

import numpy as np
from curves import (
    BAND_NAMES,
    band,
    curve,
    mean_of_known,
    name_of,
    on_grid,
    styles,
    thinned,
    union_grid,
    with_middles,
)

POINTS = 300  # of a line; a page must open at once
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
AXES = {"steps": "environment steps", "seconds": "wall-clock seconds"}

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>__TITLE__</title>
<style>
body { font: 15px system-ui, sans-serif; margin: 1.5em; color: #222; }
h1 { font-size: 1.2em; } label { margin-right: 1.5em; } #plot { height: 75vh; }
</style>
<script>__PLOTLY__</script>
</head>
<body>
<h1>__TITLE__</h1>
<p>
<label>panel <select id="panel"></select></label>
<label>axis <select id="axis"></select></label>
<label>band <select id="band"></select></label>
<label><input type="checkbox" id="runs"> single runs</label>
</p>
<div id="plot"></div>
<script id="data" type="application/json">__DATA__</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const control = name => document.getElementById(name);

function fill(name, choices) {
  for (const [value, text] of choices) control(name).add(new Option(text, value));
}
fill("panel", data.panels.map((panel, i) => [i, panel.title]));
fill("axis", Object.entries(data.axes));
fill("band", Object.entries(data.bands));

// A line is a band (two traces without a legend entry), single runs and the mean, which the legend
// group of its name switches together; Plotly remembers what is off by the names of the traces.
function traces() {
  const axis = control("axis").value, kind = control("band").value, found = [];
  for (const line of data.panels[control("panel").value].lines) {
    const drawn = line.axes[axis];
    if (!drawn) continue;
    const common = { legendgroup: line.name, mode: "lines", hoverinfo: "skip", showlegend: false };
    const band = drawn.bands[kind];
    if (band) {
      found.push({ ...common, x: drawn.x, y: band.low, line: { width: 0 } });
      found.push({ ...common, x: drawn.x, y: band.high, line: { width: 0 },
                   fill: "tonexty", fillcolor: line.colour + "2e" });
    }
    if (control("runs").checked)
      for (const run of drawn.runs)
        found.push({ ...common, x: run.x, y: run.y, name: run.name, hoverinfo: "all",
                     line: { color: line.colour, width: 0.8, dash: line.dash } });
    found.push({ x: drawn.x, y: drawn.mean, name: line.name, legendgroup: line.name, mode: "lines",
                 line: { color: line.colour, width: 2.5, dash: line.dash } });
  }
  const off = new Set(hidden);
  for (const trace of found) if (off.has(trace.legendgroup)) trace.visible = "legendonly";
  return found;
}

let hidden = [];
function remember() {
  hidden = (control("plot").data || [])
    .filter(trace => trace.showlegend !== false && trace.visible === "legendonly")
    .map(trace => trace.legendgroup);
}

function draw() {
  remember();
  Plotly.react("plot", traces(), {
    xaxis: { title: { text: data.axes[control("axis").value] } },
    yaxis: { title: { text: data.metric } },
    margin: { t: 20 }, hovermode: "closest",
  }, { responsive: true, displaylogo: false });
}
for (const name of ["panel", "axis", "band", "runs"])
  control(name).addEventListener("change", draw);
draw();
</script>
</body>
</html>
"""


def numbers(values: np.ndarray) -> list:
    """For JSON: 6 digits, null where unknown."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def one_axis(curves: dict[str, tuple]) -> dict:
    """A line over one axis: mean, every band, every run."""
    grid = with_middles(union_grid([x for x, _ in curves.values()], POINTS))
    values = np.array([on_grid(grid, *each) for each in curves.values()])
    bands = {}
    for kind in BAND_NAMES:
        if kind != "none" and len(values) > 1:
            low, high = band(kind, values)
            bands[kind] = {"low": numbers(low), "high": numbers(high)}
    runs = []
    for name, (x, y) in curves.items():
        keep = thinned(len(x), POINTS)
        runs.append({"name": Path(name).name, "x": numbers(x[keep]), "y": numbers(y[keep])})
    mean = numbers(mean_of_known(values))
    return {"x": numbers(grid), "mean": mean, "bands": bands, "runs": runs}


def page_data(found: dict, series: dict, options) -> dict:
    """All that the page shows, ready for JSON."""
    axes = dict(AXES)
    if options.x and options.x not in axes:
        axes = {options.x: options.x} | axes
    shown_panels = []
    for panel, lines in found.items():
        looks, made = styles(list(lines)), []
        for line, mine in lines.items():
            drawn = {}
            for axis in axes:
                curves = {
                    str(run.path): each
                    for run in mine
                    if (each := curve(series[run.path], options.metric, axis, options.last))
                }
                if curves:
                    drawn[axis] = one_axis(curves)
            colour = looks[line]["color"]
            look = {"colour": "#000000" if colour == "black" else colour}
            look["dash"] = DASHES[looks[line]["linestyle"]]
            if drawn:
                made.append({"name": line, "axes": drawn, **look})
        if made:
            shown_panels.append({"title": name_of(*panel, lines), "lines": made})
    names = sorted(BAND_NAMES, key=lambda kind: kind != options.band)
    bands = {kind: BAND_NAMES[kind] for kind in names}
    if options.x in AXES:
        axes = {options.x: AXES[options.x]} | axes
    return {"panels": shown_panels, "axes": axes, "bands": bands, "metric": options.metric}


def write_page(path: Path, found: dict, series: dict, options) -> Path:
    """The page at `path`."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(page_data(found, series, options)).replace("<", "\\u003c")
    page = TEMPLATE.replace("__TITLE__", escape(f"{options.metric}: {path.stem}"))
    page = page.replace("__DATA__", data).replace("__PLOTLY__", get_plotlyjs())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path
