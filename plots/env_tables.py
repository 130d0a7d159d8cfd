"""The tables of the scaling study, from the record that plots/measure/env_scaling.py makes."""

import statistics

import numpy as np

SOLVED = 475  # mean return in evaluation from which on CartPole-v1 counts as solved
# per environment: state, length, random seed (shared), action read; state, length, observation,
# final observation, reward, return, final length, terminated, truncated and ended written
STEP_BYTES = (16 + 4 + 8) + (16 + 4 + 16 + 16 + 4 + 4 + 4 + 3)
SHOWN = (1, 64, 1024, 4096, 65_536, 4**10)  # numbers of environments that have a column


def distinct(rows: list[dict], name: str) -> list:
    """The values of `name` in the order in which the rows have them."""
    return list(dict.fromkeys(row[name] for row in rows))


def medians(rows: list[dict], **which) -> dict[int, float]:
    """Median seconds by number of environments, or by work, of the rows that match."""
    key = "work" if "num_envs" in which else "num_envs"
    return {
        row[key]: statistics.median(row["seconds"])
        for row in rows
        if "seconds" in row and all(row[name] == value for name, value in which.items())
    }


def turning_point(num_envs: list[int], seconds: list[float]) -> dict:
    """Fits seconds = flat + per_env * N, all errors relative -> both, N where they are equal.

    Relative weights, because the times span decades: weighted least squares, solved exactly. Both
    coefficients are at least 0; `turning` is None where one of them is 0.
    """
    n, t = np.array(num_envs, float), np.array(seconds)
    columns = np.stack([1 / t, n / t], axis=1)
    flat, per_env = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    if flat <= 0:
        flat, per_env = 0.0, columns[:, 1].sum() / np.square(columns[:, 1]).sum()
    elif per_env <= 0:
        flat, per_env = columns[:, 0].sum() / np.square(columns[:, 0]).sum(), 0.0
    turning = float(flat / per_env) if flat and per_env else None
    return {"flat": float(flat), "per_env": float(per_env), "turning": turning}


def describe_turning(fit: dict, num_envs: list[int]) -> str:
    turning = fit["turning"]
    if turning is None:
        return "none"
    if turning > max(num_envs):
        return f"above {max(num_envs):,}"
    return f"{turning:,.0f}" if turning > min(num_envs) else "below 1"


def short(number: float) -> str:
    """1.23 M rather than 1,234,567."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def limits(part: dict, record: dict) -> list[list[str]]:
    return [["device", "copy, bytes/s", "float32 FLOP/s"]] + [
        [device, short(found["bytes_per_second"]), short(found["flops"])]
        for device, found in part["devices"].items()
    ]


def steps(part: dict, record: dict) -> list[list[str]]:
    numbers = {row["num_envs"] for row in part["rows"]}
    shown = [n for n in SHOWN if n in numbers] or sorted(numbers)
    table = [["arm", *(f"steps/s at {n:,}" for n in shown), "flat, us", "ns per env", "turning"]]
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        line = [arm, *(short(n / seconds[n]) if n in seconds else "-" for n in shown)]
        if len(seconds) > 2:
            fit = turning_point(list(seconds), list(seconds.values()))
            line += [f"{fit['flat'] * 1e6:,.1f}", f"{fit['per_env'] * 1e9:,.2f}"]
            line.append(describe_turning(fit, list(seconds)))
        table.append(line + ["-"] * (len(table[0]) - len(line)))
    return table


def work(part: dict, record: dict) -> list[list[str]]:
    works = sorted({row["work"] for row in part["rows"]})
    table = [["arm", "environments", *(f"us at {work:,}x" for work in works), "last / first"]]
    for arm, num_envs in dict.fromkeys((row["arm"], row["num_envs"]) for row in part["rows"]):
        seconds = medians(part["rows"], arm=arm, num_envs=num_envs)
        line = [arm, f"{num_envs:,}", *(f"{seconds[work] * 1e6:,.1f}" for work in works)]
        table.append([*line, f"{seconds[works[-1]] / seconds[works[0]]:,.0f}x"])
    return table


def train(part: dict, record: dict) -> list[list[str]]:
    """The share of the machine's FLOP/s is of those that `limits` has found."""
    device = "cuda" if part["machine"]["gpu"] else "cpu"
    peak = record.get("limits", {}).get("devices", {}).get(device)
    rates: dict = {}
    for row in part["rows"]:
        rates.setdefault(row["back_end"], []).append(row["sps_steady"])
    table = [["back end", "steps/s", "min-max", "of tensors", "of Gymnasium", "of the FLOP/s"]]
    for back_end, mine in rates.items():
        middle = statistics.median(mine)
        line = [back_end, f"{middle:,.0f}", f"{min(mine):,.0f}-{max(mine):,.0f}"]
        for other in ("tensors", "Gymnasium sync"):
            ratios = [one / another for one, another in zip(mine, rates[other], strict=True)]
            line.append(f"{statistics.median(ratios):.2f}x")
        line.append(f"{middle * part['flop_per_step'] / peak['flops']:.1%}" if peak else "-")
        table.append(line)
    return table


def learn(part: dict, record: dict) -> list[list[str]]:
    table = [["back end", "environments", "seeds solved", "steps", "warm s", "cold s"]]
    for back_end in distinct(part["rows"], "back_end"):
        mine = [row for row in part["rows"] if row["back_end"] == back_end]
        solved = [row["solved"] for row in mine if row["solved"]]
        line = [back_end, f"{mine[0]['flags']['num_envs']:,}", f"{len(solved)} of {len(mine)}"]
        for name, form in (("steps", ",.0f"), ("warm", ".2f"), ("cold", ".1f")):
            values = [each[name] for each in solved] or [float("nan")]
            middle, low, high = statistics.median(values), min(values), max(values)
            line.append(f"{middle:{form}} ({low:{form}}-{high:{form}})" if solved else "-")
        table.append(line)
    return table


TABLES = {  # part -> its heading and what makes its cells, a heading line first
    "limits": ("Limits", limits),
    "steps": ("Steps", steps),
    "work": ("Repeated work", work),
    "train": ("Training", train),
    "learn": (f"Learning: first evaluation of at least {SOLVED}", learn),
}


def tables(record: dict) -> list[tuple[str, list[list[str]]]]:
    """(heading, cells) of each part that is there; what could not run is named in a line."""
    found = []
    for part, (heading, cells) in TABLES.items():
        if part in record:
            rows = cells(record[part], record)
            rows += [[n, f"skipped: {why}"] for n, why in record[part].get("skipped", {}).items()]
            width = len(rows[0])
            found.append((heading, [row + [""] * (width - len(row)) for row in rows]))
    return found
