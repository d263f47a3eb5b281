"""`python -m benchmarks.page [NAME ...]`: write sections of docs/benchmarks.md, and reports, again from their figures.

Nothing is measured. Without names all are written.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks import codecs, curve, everyday, gateway_page, imports, inbox, limits, robust, scale, telemetry, waiting
from benchmarks.peers import report
from benchmarks.pipeline import figure as pipeline
from benchmarks.section import Section

SECTIONS: Final[dict[str, Section]] = {
    module.SECTION.name: module.SECTION
    for module in (
        report,
        everyday,
        waiting,
        imports,
        codecs,
        telemetry,
        limits,
        curve,
        scale,
        inbox,
        pipeline,
        gateway_page,
        robust,
    )
}
"""All sections, in the order of the page."""


def main() -> None:
    """Write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SECTIONS))
    names = parser.parse_args().names or list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    for name in names:
        SECTIONS[name].write()


if __name__ == "__main__":
    main()
