"""`foretoken audit`: is the output distribution really the target's own?"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import typer

from foretoken.cli.command import command
from foretoken.cli.options import RecipeOptions, load_engine, resolve_models
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_audited, check_counts, check_sampling, check_seed
from foretoken.recipe import AUTO, KINDS, LOOKUPS, NGRAM, SAME, Recipe, check_recipe, in_a_row

BRANCHING = "kary:2x3"  # the default tree, which has all that can go wrong
OTHERS = ("chain:3", "dynamic:14")  # what is audited in its place where the rule is not lossless for its draws


@dataclass(frozen=True)
class AuditedRecipe(RecipeOptions):
    """The engine that is audited.

    tree: Token tree: $trees. See docs/trees-and-rules.md. Default: kary:2x3; chain:3 where the verifier, the law or the
    vocab takes one draft token per node; dynamic:14 where a model drafts by law opaque and no verifier is named.
    """

    def usual_tree(self) -> str:
        """Return the name of the default tree: the first one of which the rule takes the draws.

        All that the recipe names is known. Where no tree goes with it, loading the engine says why.
        """
        _, drafter = in_a_row(resolve_models(self.target, self.drafter)[1])
        # Drafter auto is a lookup or the target's own weights, and only the former go with law opaque by themselves.
        looks_up = drafter in LOOKUPS or (drafter == AUTO and self.law == "opaque")
        kind = self.vocab if self.vocab in KINDS else NGRAM if looks_up else SAME
        if KINDS[kind].own_draws:
            return OTHERS[0]
        if self.verifier is None and self.law is None:
            return BRANCHING
        from foretoken.names import check_ahead  # takes seconds

        for tree in (BRANCHING, *OTHERS):
            with suppress(ForetokenError):
                check_ahead(Recipe(tree, self.verifier, self.vocab, self.draft_probability, self.law), kind, kind)
                return tree
        return BRANCHING


@command
def audit(
    *,
    engine: AuditedRecipe,
    temperature: float = 1.0,
    samples: int = 4000,
    seed: int = 0,
    exact_only: bool = False,
    json_: bool = False,
) -> None:
    """Check that the text has the target's distribution. Exit code 1 if a check fails.

    Enumerated, over every outcome of every draw, in float64: each rule at one node, for small p and q of up to 5
    tokens; and, through the real decoder, the next 3 tokens of small table models. Tested on the given models: scores
    of trees against scores of their paths; in the compiled kernel, that these are the same bits; greedy text against
    plain decoding; the distribution of sampled tokens against the target's own. Rules and drafters that are known to
    be wrong are put in, and must be found.

    temperature: Temperature of the goodness-of-fit test; above 0.
    samples: Generations for the goodness-of-fit test, at least 200, and half as many for the rule that is known to be
        wrong. With a model of 1.5 B parameters 1,000 take some two minutes on two cores. Fewer see less.
    seed: Seed of the whole audit.
    exact_only: Only the exact enumerations; loads no model.
    """
    check_sampling(temperature=temperature)
    check_counts(samples=samples)
    check_seed(seed)
    check_recipe(**{each.name: getattr(engine, each.name, None) for each in fields(Recipe)})
    if not exact_only:
        check_audited(temperature, samples)
    loaded = None if exact_only else load_engine(**vars(replace(engine, tree=engine.tree or engine.usual_tree())))
    from foretoken.audit import run

    report = run(loaded, temperature=temperature, samples=samples, seed=seed,
                 progress=lambda line: print(line, file=sys.stderr))  # fmt: skip
    print(json.dumps(report.json()) if json_ else report.text())
    if not report.passed:
        raise typer.Exit(1)
