"""Turns the outputs of matmul_sweep, torch_matmul.py and stock-burn into rows for benches/results.

    python3 record.py 2026-11-21 abc1234 "driver 580" blackburn=sweep.tsv torch=torch.tsv burn=burn.tsv

Of matmul_sweep the picked plans are taken.
"""

import sys


def main():
    date, commit, note, *sources = sys.argv[1:]
    for source in sources:
        subject, path = source.split("=", 1)
        with open(path) as file:
            lines = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
        header = lines[0]
        for fields in lines[1:]:
            row = dict(zip(header, fields))
            if "TFLOP/s" not in row or row.get("picked", "*") != "*":
                continue
            plan = f"; {row['plan']}" if "plan" in row else ""
            print(
                date,
                commit,
                "matmul",
                "forward",
                row["dtype"].lower(),
                row["shape"],
                subject,
                row["median_ms"],
                row["min_ms"],
                row["max_ms"],
                row["TFLOP/s"],
                "TFLOP/s",
                f"{row['name']}; {row['layout']}{plan}; {note}",
                sep="\t",
            )


main()
