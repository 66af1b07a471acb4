"""Run ../shared/fixture_check.py and fail if a fixture that held before (.ci/holds.txt) falls short now."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared"


def main() -> int:
    expected = set((HERE / "holds.txt").read_text().split())
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(SHARED / "fixture_check.py"), "--json", str(result)]
        subprocess.run(command, check=False, cwd=HERE.parent)
        rows = {row["case"]: row for row in json.loads(result.read_text())}
    lost = sorted(name for name in expected & rows.keys() if not rows[name]["ok"])
    for name in lost:
        print(f"LOST {name}: {rows[name].get('detail', '')}")
    news = sorted(name for name, row in rows.items() if row["ok"] and name not in expected)
    if news:
        print(f"hold now, but are not in .ci/holds.txt yet: {' '.join(news)}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
