"""The gallery of the guide: its files run, and its pictures are what their commands make."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from serving.simulator.report import pictures
from serving.simulator.scenario import read_scenario
from serving.simulator.scenario_runs import run_scenario

GUIDE = Path(__file__).parents[3] / "docs/guide"
FOLDER = GUIDE / "scenarios"
PAGE = (GUIDE / "scenarios.md").read_text()
SHOWN = re.findall(
    r"```console\n\$ mooncake simulate scenario (\S+) --svg (\S+)\n```\n\n"
    r"!\[[^\]]+\]\(scenarios/([^)]+)\)",
    PAGE,
)
SVG = "{http://www.w3.org/2000/svg}"


def form(drawn):
    """What a picture is about, whatever the numbers: its words in their places, and its lines."""
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter(f"{SVG}text")]
    lines = [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")]
    return [word for word in words if not re.fullmatch(r"[\d.,]+[kMG]?", word)], lines


@pytest.mark.parametrize(("file", "folder", "picture"), SHOWN, ids=[file for file, *_ in SHOWN])
def test_a_picture_is_what_its_command_makes(file, folder, picture):
    known = read_scenario(FOLDER / file)
    few = msgspec.structs.replace(known.source, requests=60)
    made = {
        f"{folder}/{each.name}.svg": each.svg
        for each in pictures(run_scenario(known._replace(source=few)))
    }
    assert form((FOLDER / picture).read_text()) == form(made[picture])


def test_every_scenario_is_shown_and_every_picture():
    assert len(SHOWN) == 5
    assert sorted(file for file, *_ in SHOWN) == sorted(path.name for path in FOLDER.glob("*.toml"))
    assert sorted(picture for *_, picture in SHOWN) == sorted(
        str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.svg")
    )
    [told] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert told == (FOLDER / "capacity.toml").read_text()
