"""The schema of plans, with every entry that it allows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from compress.plans.plan import (
    SHARED_EXPERT,
    Part,
    Plan,
    PlannedExpert,
    Source,
    check_plan,
    concatenation_plan,
    narrowed_expert,
    plan_from_json,
    plan_to_json,
    pruning_plan,
)
from engine.errors import PlanError
from engine.families.layer_config import MoeConfig

MOE = MoeConfig(experts=4, experts_per_token=2, expert_width=3, normalise_top_k=True)
MERGING = Plan(
    {
        0: (
            PlannedExpert((Part((Source(0, 0.75), Source(2, 0.25, (1, 0, 2)))),), (Source(0),)),
            PlannedExpert((Part((Source(1),)),), (Source(1, 0.5), Source(3, 0.5))),
        )
    }
)


def test_pruning_is_one_hot_and_reads_as_a_list_of_experts() -> None:
    plan = pruning_plan({0: [5, 0, 3], 2: {1}})
    assert plan_to_json(plan) == {"schema_version": 1, "kind": "moe", "layers": {"0": [0, 3, 5], "2": [1]}}
    assert plan.experts_per_layer == (3, 1)


def test_a_permutation_is_one_line_and_a_list_is_read_too() -> None:
    values = plan_to_json(MERGING)
    source = values["layers"]["0"][0]["parts"][0]["sources"][1]
    assert source == {"expert": 2, "coefficient": 0.25, "permutation": "1 0 2"}
    source["permutation"] = [1, 0, 2]
    assert plan_from_json(values) == MERGING
    source["permutation"] = "1 x 2"
    with pytest.raises(PlanError, match="layer 0, expert 0"):
        plan_from_json(values)


@pytest.mark.parametrize(
    "plan",
    [
        pruning_plan({0: [0, 1]}),
        MERGING,
        concatenation_plan({0: [(1, 0.5), (3, 0.25), (SHARED_EXPERT, 0.7)]}),
        Plan({0: (narrowed_expert(2, [0, 2]), narrowed_expert(3, range(3)))}),
        Plan(pruning_plan({0: [0, 1]}).layers, prediction=(1, 3)),
        Plan(pruning_plan({0: [0, 1]}).layers, prediction=None),
    ],
    ids=["pruning", "merging", "dense", "units", "with prediction", "without prediction"],
)
def test_every_kind_survives_json_and_fits_its_model(plan: Plan) -> None:
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert again == plan
    check_plan(again, {0: replace(MOE, shared_width=3)}, {})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (pruning_plan({1: [0]}), "MoE layers are"),
        (pruning_plan({0: []}), "at least one"),
        (pruning_plan({0: [4]}), "experts 0 to 3"),
        (concatenation_plan({0: [(SHARED_EXPERT, 1.0)]}), "has none"),
        (concatenation_plan({0: [(0, float("nan"))]}), "not finite"),
        (Plan({0: (PlannedExpert((Part((Source(0, 1.0, (0, 0, 1)),)),), (Source(0),)),)}), "permutation"),
        (Plan({0: (PlannedExpert((Part((Source(0),)),)),)}), "no router row"),
        (Plan({0: (PlannedExpert((Part((Source(0),)), Part((Source(1),))), (Source(0),)),)}), "only a dense plan"),
        (Plan({0: (PlannedExpert((), (Source(0),)),)}), "no source"),
        (Plan({0: pruning_plan({0: [0, 1]}).layers[0]}, kind="dense"), "exactly one expert"),
        (Plan({0: ()}, kind="sparse"), "kind"),
        (Plan({0: (narrowed_expert(0, []),)}), "keeps no hidden unit; leave the expert out"),
        (Plan({0: (narrowed_expert(0, [1, 1]),)}), "keeps hidden unit 1 twice"),
        (Plan({0: (narrowed_expert(0, [2, 0]),)}), "keeps hidden unit 0 after 2; name units in ascending order"),
        (Plan({0: (narrowed_expert(0, [0, 3]),)}), "keeps hidden unit 3; its sources have units 0 to 2"),
        (Plan({0: (narrowed_expert(0, [-1, 2]),)}), "keeps hidden unit -1"),
        (
            Plan({0: (PlannedExpert((Part((Source(0, 1.0, (1, 0)),), units=(0,)),), (Source(0),)),)}),
            "permutation of expert 0 is not one of 3 hidden units",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        check_plan(plan, {0: MOE}, {})
    assert "\n" not in str(raised.value)


def test_units_are_numbered_by_their_own_source_where_experts_differ_in_width() -> None:
    ragged = replace(MOE, expert_widths=(1, 3, 2, 3))
    check_plan(Plan({0: (narrowed_expert(1, [0, 2]), narrowed_expert(2, [1]))}), {0: ragged}, {})
    with pytest.raises(PlanError, match="units 0 to 1"):
        check_plan(Plan({0: (narrowed_expert(2, [2]),)}), {0: ragged}, {})
    two = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5))),), (Source(0),))
    with pytest.raises(PlanError, match=r"adds up experts that are \[1, 3\] hidden units wide"):
        check_plan(Plan({0: (two,)}), {0: ragged}, {})


def test_selected_units_are_one_line_and_a_list_is_read_too() -> None:
    plan = Plan({0: (narrowed_expert(1, [0, 2]),)})
    values = plan_to_json(plan)
    (part,) = values["layers"]["0"][0]["parts"]
    assert part == {"sources": [{"expert": 1}], "units": "0 2"} and not plan.layers[0][0].is_copy
    part["units"] = [0, 2]
    assert plan_from_json(values) == plan
    part["units"] = "0 2.5"
    with pytest.raises(PlanError, match="layer 0, expert 0"):
        plan_from_json(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "not a plan"),
        ({"schema_version": 2, "layers": {}}, "schema_version 2"),
        ({"schema_version": 1, "layers": {"a": [0]}}, "layer 'a'"),
        ({"schema_version": 1, "layers": {"0": 3}}, "layer '0'"),
        ({"schema_version": 1, "layers": {"0": ["x"]}}, "expert 0"),
        ({"schema_version": 1, "layers": {"0": [{"parts": [{"sources": [{"expert": True}]}]}]}}, "no expert"),
        ({"schema_version": 1, "layers": {"0": [True]}}, "expert 0"),
    ],
)
def test_json_that_is_no_plan_is_refused(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_json(values)
