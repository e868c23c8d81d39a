"""Who is refused: by the first token, by decode load now, by decode load as predicted."""

import pytest

from serving.scheduling.admission import AtDecode, ByForecast, ByLoad, Outlook, decode_load
from serving.scheduling.costs import Costs
from serving.scheduling.learnt import LearntDecode, LearntDuration
from serving.scheduling.under_way import UnderWay
from serving.scheduling.views import DecodeView, Slo

SLO = Slo(ttft_s=2.0, tbt_s=0.1)
EVERY = [AtDecode(), ByLoad(), ByForecast()]


def outlook(ttft_s=1.0, batches=(0, 0), under_way=(), decode_s=5.0, queue_s=0.5, where="d0"):
    """Two decode instances, 20 ms between tokens for each request in a batch."""
    models = Costs(decode=LearntDecode((0.0, 0.02, 0.0)), duration=LearntDuration(decode_s))
    views = [DecodeView(f"d{at}", batch) for at, batch in enumerate(batches)]
    expected = UnderWay()
    for begins in under_way:
        expected.add(begins, 10, where)
    chosen = min(views, key=lambda view: view.batch)
    return Outlook(100.0, SLO, ttft_s, queue_s, 10, chosen, expected, models)


@pytest.mark.parametrize("policy", EVERY)
def test_an_idle_system_takes_everything(policy):
    assert policy.refusal(outlook()) is None


@pytest.mark.parametrize("policy", EVERY)
def test_a_late_first_token_is_refused_with_the_wait_that_helps(policy):
    refusal = policy.refusal(outlook(ttft_s=5.0))
    assert "first token" in refusal.reason
    assert refusal.retry_after_s == pytest.approx(3.0)


@pytest.mark.parametrize("policy", EVERY)
def test_who_would_be_alone_is_taken_whatever_is_predicted(policy):
    models = Costs(decode=LearntDecode((9.0, 9.0, 0.0)), duration=LearntDuration(5.0))
    lone = Outlook(100.0, SLO, 50.0, 0.0, 10, DecodeView("d0", 0), UnderWay(), models)
    assert policy.refusal(lone) is None


def test_only_early_rejection_looks_at_decode():
    busy = outlook(batches=(6, 6))
    assert AtDecode().refusal(busy) is None
    refusal = ByLoad().refusal(busy)
    assert "tokens would come 1.40 times" in refusal.reason
    assert refusal.retry_after_s == pytest.approx(5.0 * (1 - 1 / 1.4))


def test_the_instance_that_is_chosen_counts_and_not_how_busy_others_are():
    assert ByLoad().refusal(outlook(batches=(1, 40))) is None
    assert ByLoad().refusal(outlook(batches=(5, 5))) is not None


def test_a_forecast_counts_who_decodes_by_then():
    # Nobody decodes now, five will: the current load says yes, the forecast no.
    soon = [100.5] * 5
    assert ByLoad().refusal(outlook(under_way=soon)) is None
    assert "will be busy" in ByForecast().refusal(outlook(under_way=soon)).reason
    assert ByForecast().refusal(outlook(under_way=soon, where="d1")) is None, "those go elsewhere"


def test_a_forecast_leaves_out_who_will_have_ended_while_it_waits():
    # Six decode, for 1 s on average: two are left when its prompt is begun with.
    busy = outlook(batches=(6, 6), under_way=[95.0] * 6, decode_s=1.0, queue_s=1.0, ttft_s=1.5)
    assert ByLoad().refusal(busy) is not None
    assert ByForecast().refusal(busy) is None


def test_what_ends_while_a_prompt_is_computed_goes_to_others():
    busy = outlook(batches=(6, 6), under_way=[95.0] * 6, decode_s=1.0, queue_s=0.0, ttft_s=1.5)
    assert ByForecast().refusal(busy) is not None


def test_who_outlasts_the_mean_is_still_there():
    # Of 5 s each has had 20: long answers are those that are there.
    busy = outlook(batches=(6, 6), under_way=[80.0] * 6, queue_s=0.1)
    assert ByForecast().refusal(busy) is not None


def test_a_forecast_leaves_out_who_comes_later():
    later = [101.5] * 6
    assert ByForecast().refusal(outlook(ttft_s=1.0, under_way=later)) is None


def test_load_is_the_mean_over_instances():
    costs = outlook().costs
    views = [DecodeView("d0", 10), DecodeView("d1", 0)]
    assert decode_load(views, costs, SLO) == pytest.approx(1.0)
    assert decode_load([], costs, SLO) == 0.0


def test_an_slo_of_nothing_is_refused():
    with pytest.raises(ValueError, match="SLO"):
        Slo(ttft_s=0)
