"""`foretoken reproduce`: figures of the papers beside ours. One file per artefact; the papers' numbers stand there as
constants, each a citation of its table or figure, and only ever appear in a column or a note named after the paper."""

from typing import TYPE_CHECKING

from foretoken.core.lazy import Lazy

if TYPE_CHECKING:
    from foretoken.reproduce.run import Artefact

# name -> (title, where it is)
_TABLE = {
    "spechub-figures": ("SpecHub, Figures 4-5: three tokens, two drafts", "spechub_figures:spechub_figures"),
    "spechub-table4": ("SpecHub, Table 4: toy distributions", "spechub_table4:spechub_table4"),
    "spechub-tables1-3": (
        "SpecHub, Tables 1-3: first and second draft by temperature",
        "spechub_drafts:spechub_drafts",
    ),
    "spechub-tables5-7": (
        "SpecHub, Tables 5-7: tokens a step on binary, ternary and Sequoia trees",
        "spechub_trees:spechub_trees",
    ),
    "global-resolution-table1": (
        "Global Resolution, Table 1: solve time and success",
        "global_resolution_times:table1",
    ),
    "global-resolution-table2": (
        "Global Resolution, Table 2: acceptance in 10 and 100 ms",
        "global_resolution_times:table2",
    ),
    "global-resolution-table4": (
        "Global Resolution, Table 4: i.i.d. paths of several steps",
        "global_resolution_steps:table4",
    ),
    "global-resolution-figure1": (
        "Global Resolution, Figures 1-3: acceptance by drafts",
        "global_resolution_acceptance:figure1",
    ),
    "global-resolution-temperature": (
        "Global Resolution, Figures 4-5: the target's temperature",
        "global_resolution_temperature:temperature",
    ),
    "slrs-table5": ("SLRS, Table 5, Figures 1-2: ways to spell a token", "slrs_table5:slrs_table5"),
    "gumiho-theorem": ("Gumiho, section 3.2: earlier positions count more", "gumiho_theorem:gumiho_theorem"),
    "randomised-drafting": (
        "Randomised Drafting: Lemmas 4.1-4.4, Figures 3-4",
        "randomised_drafting:randomised_drafting",
    ),
}
TITLES = {name: title for name, (title, _) in _TABLE.items()}
ARTEFACTS: "Lazy[Artefact]" = Lazy({name: f"reproduce.{home}" for name, (_, home) in _TABLE.items()})
