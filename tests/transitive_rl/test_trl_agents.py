"""Agents: updates against a plain re-implementation, exact resumption, answers, every refusal, damaged files."""
import copy
import json
import math
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from iclr26.transitive_rl.agents import AGENTS, ENV_SETTINGS, Agent, NStepAgent, TRLAgent, TRLConfig, interval_quasimetric, with_random_goals
from iclr26.transitive_rl.data import StochasticDynamicsWarning, TrajectoryDataset

torch.set_num_threads(1)
TINY = dict(hidden=(8, 8), batch_size=16, discount=.9, lr=1e-2, tau=.1, flow_steps=2, num_samples=3)
CONTINUOUS, DISCRETE = ["trl", "td", "mc", "gcbc", "gcfbc", "gciql", "crl", "qrl"], ["trl", "td", "mc", "gcbc", "gciql", "crl", "qrl"]
VALUES = ["trl", "td", "mc", "gciql", "crl", "qrl"]


def data(discrete=False, oracle=False, seed=0, lengths=(6, 9, 4)):
    rng, n = np.random.default_rng(seed), sum(lengths)
    return TrajectoryDataset(rng.standard_normal((n, 3)), rng.integers(0, 4, n) if discrete else rng.uniform(-1, 1, (n, 2)), np.isin(np.arange(n), np.cumsum(lengths) - 1),
                             rng.standard_normal((n, 2)) if oracle else None, n_actions=4 if discrete else None)


def make(kind="trl", *, discrete=False, oracle=False, steps=0, **change):
    config = TRLConfig(**TINY | dict(policy="discrete" if discrete else "rpg") | change)
    agent = AGENTS[kind].for_dataset(config, data(discrete, oracle), **({"n": 2} if kind == "td" else {}))
    if steps: agent.fit(data(discrete, oracle), steps)
    return agent


def same(a, b):
    "Bit for bit the same networks, targets, optimiser and counters."
    x, y = a._state(), b._state()
    return a.steps_done == b.steps_done and set(x) == set(y) and all(torch.equal(x[key], y[key]) for key in x)


def ask(agent, n=5, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 3)).astype("f4"), rng.standard_normal((n, agent.goal_dim)).astype("f4"), (rng.integers(0, 4, n) if agent.n_actions else rng.uniform(-1, 1, (n, 2)).astype("f4"))


# configuration -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [
    dict(discount=0), dict(discount=1.), dict(discount=math.nan), dict(discount="x"), dict(expectile=0.), dict(expectile=1), dict(lam=-.1), dict(lam=math.inf), dict(alpha=-1), dict(tau=0), dict(tau=1.1), dict(base_radius=0),
    dict(base_radius=1.5), dict(hidden=()), dict(hidden=(8, 0)), dict(hidden="88"), dict(hidden=8), dict(n_members=0), dict(batch_size=0), dict(batch_size=True), dict(lr=0), dict(lr=-1), dict(goal="near"), dict(actor_goal="end"),
    dict(actor_p_random=2), dict(actor_p_random=-.1), dict(policy="sac"), dict(flow_steps=0), dict(num_samples=0), dict(oracle_distill=1), dict(loss_form="l2"), dict(seed=-1), dict(seed=.5), dict(threads=0), dict(device="toaster"), dict(device=None),
])
def test_configuration_refusals(change):
    (name, value), = change.items()
    with pytest.raises(ValueError, match=name): TRLConfig(**change)


def test_configuration_defaults_and_tasks():
    c = TRLConfig()
    assert (c.discount, c.expectile, c.lam, c.alpha, c.tau, c.hidden, c.batch_size, c.lr, c.policy) == (.999, .7, 0., .03, .005, (1024,) * 4, 1024, 3e-4, "rpg")
    assert TRLConfig(hidden=[4, 5]).hidden == (4, 5) and TRLConfig(tau=1).tau == 1
    with pytest.raises(FrozenInstanceError): c.discount = .5
    p = TRLConfig.for_env("pointmaze-medium-navigate", seed=7)
    assert (p.discount, p.lam, p.alpha, p.hidden, p.seed) == (.99, .7, 10., (512,) * 3, 7)
    assert TRLConfig.for_env("pointmaze-medium-navigate-oraclerep-v0", seed=7) == p
    assert TRLConfig.for_env("puzzle-4x5-play").policy == "frs" and TRLConfig.for_env("humanoidmaze-giant-navigate").alpha == .1
    assert all(TRLConfig.for_env(name, hidden=(4,)).hidden == (4,) for name in ENV_SETTINGS)
    with pytest.raises(ValueError, match="cube-single-play, .*humanoidmaze"): TRLConfig.for_env("pointmaze")


@pytest.mark.parametrize("arguments", [{}, dict(action_dim=2, n_actions=2)])
def test_one_kind_of_action(arguments):
    with pytest.raises(ValueError, match="exactly one"): TRLAgent(TRLConfig(**TINY), 3, **arguments)


@pytest.mark.parametrize("policy, kind", [("discrete", dict(action_dim=2)), ("rpg", dict(n_actions=2)), ("frs", dict(n_actions=2))])
def test_policies_fit_the_actions(policy, kind):
    with pytest.raises(ValueError, match=f"policy='{policy}'"): TRLAgent(TRLConfig(**TINY, policy=policy), 3, **kind)


def test_constructor_refusals():
    config = TRLConfig(**TINY)
    with pytest.raises(TypeError, match="TRLConfig"): TRLAgent(TINY, 3, action_dim=2)
    for change in (dict(obs_dim=0), dict(obs_dim=3, goal_dim=0), dict(obs_dim=3, action_dim=-1)):
        a = dict(action_dim=2) | change
        with pytest.raises(ValueError, match="expected an integer of 1 or more"): TRLAgent(config, a.pop("obs_dim"), **a)
    with pytest.raises(ValueError, match="n=0"): NStepAgent(config, 3, action_dim=2, n=0)
    with pytest.raises(ValueError, match="n_actions=3"): AGENTS["gcfbc"](replace(config, policy="discrete"), 3, n_actions=3)
    assert list(AGENTS) == CONTINUOUS and AGENTS["td"](config, 3, action_dim=2).n == 1


# an update ---------------------------------------------------------------------------------------------------------------
def reference_critic_loss(agent, b, r1, r2):
    "Section by section in float64, one member and one row at a time."
    c, total = agent.config, 0.
    target, online = (copy.deepcopy(x["critic"]).double() for x in (agent.targets, agent.nets))
    goal, mid_goal = (b.goal_obs, b.mid_obs) if c.oracle_distill else (b.goal, b.mid_goal)
    one = lambda net, e, obs, g, act: float(net(obs[None].double(), g[None].double(), act[None].double())[e, 0].sigmoid())
    with torch.no_grad():
        for e in range(c.n_members):
            for n in range(len(b)):
                d1, d2 = int(b.k[n] - b.i[n]), int(b.j[n] - b.k[n])
                y1 = c.discount**d1 if r1 is None or d1 <= r1 else one(target, e, b.obs[n], mid_goal[n], b.act[n])
                y2 = c.discount**d2 if d2 <= r2 else one(target, e, b.mid_obs[n], goal[n], b.mid_act[n])
                y, q = y1 * y2, one(online, e, b.obs[n], goal[n], b.act[n])
                w = (c.expectile if y >= q else 1 - c.expectile) * (1 + math.log(y) / math.log(c.discount)) ** -c.lam
                total += w * -(y * math.log(q) + (1 - y) * math.log(1 - q))
    return total / (c.n_members * len(b))


@pytest.mark.parametrize("kind, radius", [("trl", 1), ("trl", 3), ("td", 1), ("td", 2), ("mc", 1)])
@pytest.mark.parametrize("oracle, distill", [(False, False), (True, False), (True, True)])
def test_critic_loss_by_definition(kind, radius, oracle, distill):
    agent = make(kind, oracle=oracle, oracle_distill=distill, base_radius=radius, lam=.7, policy="none", n_members=3, steps=5)   # after five steps target and online differ
    b = agent.sample(data(oracle=oracle), 3)
    if kind == "mc": assert torch.equal(b.k, b.j)
    if kind == "td": assert torch.equal(b.k, torch.minimum(b.i + 2, b.j))
    expected = reference_critic_loss(agent, b, *{"trl": (radius, radius), "td": (None, radius), "mc": (None, 0)}[kind])
    assert agent.update(b)["critic_loss"] == pytest.approx(expected, rel=1e-4)


def test_step_is_adam_then_average():
    agent = make(steps=3)
    b = agent.sample(data(), 5)
    twin, online = copy.deepcopy(agent), [p.detach().clone() for p in agent.nets["critic"].parameters()]
    target = [p.clone() for p in agent.targets["critic"].parameters()]
    losses, _ = twin._losses(b)
    gradient = torch.autograd.grad(losses["critic_loss"], list(twin.nets["critic"].parameters()))
    moments = agent._optimizer.state[agent._vectors["critic"]]
    m0, v0, t = moments["exp_avg"].clone(), moments["exp_avg_sq"].clone(), int(moments["step"]) + 1
    agent.update(b)
    at = 0
    for p, before, g, old, new in zip(agent.nets["critic"].parameters(), online, gradient, target, agent.targets["critic"].parameters()):
        m, v = (x[at:at + p.numel()].view(p.shape) for x in (m0, v0))
        m, v = .9 * m + .1 * g, .999 * v + .001 * g * g
        expected = before - 1e-2 * (m / (1 - .9**t)) / ((v / (1 - .999**t)).sqrt() + 1e-8)
        assert torch.allclose(p, expected, atol=1e-5) and torch.allclose(new, .9 * old + .1 * p, atol=1e-6)
        at += -(-p.numel() // 16) * 16


def test_target_starts_equal_and_carries_no_gradient():
    agent = make()
    assert all(torch.equal(a, b) for a, b in zip(agent.nets["critic"].parameters(), agent.targets["critic"].parameters()))
    assert not any(p.requires_grad for p in agent.targets.parameters()) and make(tau=1., steps=2).critic_logits(*map(torch.zeros, ((1, 3), (1, 2), (1, 3)))).equal(make(tau=1., steps=2).critic_logits(*map(torch.zeros, ((1, 3), (1, 2), (1, 3))), target=True))


def test_policy_gradient_does_not_reach_the_critic():
    agent = make(steps=2)
    agent._optimizer.zero_grad(set_to_none=False)
    agent.policy.loss(agent, agent.sample(data(), 0)).backward()
    assert not any(p.grad.any() for p in agent.nets["critic"].parameters()) and any(p.grad.any() for p in agent.nets["actor"].parameters())


def test_rpg_loss_by_definition():
    agent = make(alpha=.4, steps=3)
    b = agent.sample(data(), 2)
    mean = agent.nets["actor"](b.obs, b.actor_goal)
    q = agent.nets["critic"](b.obs, b.actor_goal, mean.clamp(-1, 1)).min(0).values
    expected = -q.mean() / (q.abs().mean() + 1e-6) - .4 * torch.distributions.Normal(mean, 1.).log_prob(b.act).sum(1).mean()
    assert agent.update(b)["actor_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_discrete_loss_by_definition():
    agent = make(discrete=True, alpha=.4, steps=3)
    b = agent.sample(data(True), 2)
    logits, q = agent.nets["actor"](b.obs, b.actor_goal), agent.nets["critic"](b.obs, b.actor_goal).mean(0)
    expected = -(logits.softmax(1) * q).sum(1).mean() + .4 * F.cross_entropy(logits, b.act)
    assert agent.update(b)["actor_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_distillation_by_definition():
    agent = make(oracle=True, oracle_distill=True, steps=3)
    b = agent.sample(data(oracle=True), 2)
    q = agent.nets["critic"](b.obs, b.goal_obs, b.act).sigmoid()
    expected = F.binary_cross_entropy_with_logits(agent.nets["distilled"](b.obs, b.goal, b.act), q)
    metrics = agent.update(b)
    assert metrics["distill_loss"] == pytest.approx(float(expected.detach()), rel=1e-5) and set(metrics) == {"critic_loss", "distill_loss", "actor_loss", "q_mean", "target_mean"}
    obs, goal, act = ask(agent)
    assert np.allclose(agent.value(obs, goal, act), agent.nets["distilled"](*map(torch.from_numpy, (obs, goal, act))).sigmoid().amin(0).detach(), atol=1e-6)
    assert agent.critic_logits(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3)).shape == (2, 2)      # the main critic takes observations


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_non_finite_loss_changes_nothing(kind):
    agent = make(kind, steps=2)
    b = agent.sample(data(), 0)
    before = copy.deepcopy(agent)
    with pytest.raises(FloatingPointError, match="_loss is nan"): agent.update(replace(b, obs=b.obs * math.nan))
    for key, x in before._state().items():
        if key != "noise": assert torch.equal(x, agent._state()[key]), key
    assert agent.steps_done == 2 and np.isfinite(agent.update(b)["actor_loss"])


@pytest.mark.parametrize("change", [dict(obs=torch.zeros(16, 2)), dict(goal=torch.zeros(16, 2)), dict(act=torch.zeros(16)), dict(mid_act=torch.zeros(16, 3)), dict(actor_goal=torch.zeros(15, 3))])
def test_batches_of_other_dimensions(change):
    agent, (name, _) = make(), *change.items()
    with pytest.raises(ValueError, match=rf"batch\.{name} has shape"): agent.update(replace(agent.sample(data(), 0), **change))


# fitting -----------------------------------------------------------------------------------------------------------------
CASES = [(k, False) for k in CONTINUOUS] + [(k, True) for k in DISCRETE]


@pytest.mark.parametrize("kind, discrete", CASES)
def test_two_halves_make_a_whole(kind, discrete, tmp_path):
    "fit(3) + save + load + fit(3) equals fit(6), bit for bit, and seeds matter."
    d, whole, half = data(discrete), make(kind, discrete=discrete), make(kind, discrete=discrete)
    last = whole.fit(d, 6)[-1]
    half.fit(d, 3)
    half.save(tmp_path / "agent")
    again = AGENTS[kind].load(tmp_path / "agent")
    assert same(half, again) and type(again) is AGENTS[kind] and again.config == half.config
    assert half.fit(d, 3)[-1] == again.fit(d, 3)[-1] == last and same(whole, half) and same(whole, again)
    other = make(kind, discrete=discrete, seed=1)
    assert other.fit(d, 6)[-1] != last


@pytest.mark.parametrize("policy", ["rpg", "frs", "none"])
@pytest.mark.parametrize("oracle, distill", [(False, False), (True, False), (True, True)])
def test_modes_resume(policy, oracle, distill, tmp_path):
    d, agent = data(oracle=oracle), make(policy=policy, oracle=oracle, oracle_distill=distill, steps=3)
    agent.save(tmp_path / "a")
    again = Agent.load(tmp_path / "a")
    assert agent.fit(d, 3) == again.fit(d, 3) and same(agent, again)


def test_what_is_logged():
    agent, d = make(), data()
    history = agent.fit(d, 25, log_every=10)
    assert [h["step"] for h in history] == [10, 20, 25] and set(history[0]) == {"step", "critic_loss", "actor_loss", "q_mean", "target_mean"} and all(type(v) is float for k, v in history[0].items() if k != "step")
    assert [h["step"] for h in agent.fit(d, 5, log_every=10)] == [30] and [h["step"] for h in agent.fit(d, 20, log_every=10)] == [40, 50]
    assert agent.fit(d, 0) == [] and agent.steps_done == 50


def test_callback_sees_and_stops():
    seen, agent = [], make()
    history = agent.fit(data(), 100, log_every=5, callback=lambda a, step, m: seen.append((a is agent, step, m["step"])) or step == 15)
    assert seen == [(True, 5, 5), (True, 10, 10), (True, 15, 15)] and len(history) == 3 and agent.steps_done == 15
    assert len(make().fit(data(), 10, log_every=5, callback=lambda *a: "go on")) == 2          # only True stops


def test_progress_bar_does_not_change_anything(capsys):
    a, b = make(), make()
    assert a.fit(data(), 3, progress=True) == b.fit(data(), 3) and same(a, b)
    assert "TRLAgent" in capsys.readouterr().out


@pytest.mark.parametrize("other, message", [(data(discrete=True), "dataset.action_dim=None"), (data(oracle=True), "dataset.goal_dim=2")])
def test_fit_refuses_other_dimensions(other, message):
    agent = make()
    with pytest.raises(ValueError, match=message): agent.fit(other, 1)
    assert agent.steps_done == 0


@pytest.mark.parametrize("arguments, message", [(dict(steps=-1), "steps=-1"), (dict(steps=1.5), "steps=1.5"), (dict(steps=1, log_every=0), "log_every=0")])
def test_fit_refuses_counts(arguments, message):
    with pytest.raises(ValueError, match=message): make().fit(data(), **arguments)


def test_stochastic_logs_warn():
    coin = TrajectoryDataset(np.float32([[0, 0, 0], [1, 1, 1], [0, 0, 0], [2, 2, 2]]), np.full((4, 2), .5), [0, 1, 0, 1])
    agent = make()
    for _ in range(2):
        with pytest.warns(StochasticDynamicsWarning, match="different outcomes"): agent.fit(coin, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.fit(data(), 1)


def test_threads_are_restored():
    d, agent = data(), make(threads=2)
    inside = []
    agent.fit(d, 1, callback=lambda *a: inside.append(torch.get_num_threads()))
    agent.act(*ask(agent)[:2])
    assert torch.get_num_threads() == 1
    original = agent._losses
    agent._losses = lambda b: inside.append(torch.get_num_threads()) or original(b)
    agent.update(agent.sample(d, 0))
    assert inside[-1] == 2 and torch.get_num_threads() == 1
    agent._losses = lambda b: 1 / 0
    with pytest.raises(ZeroDivisionError): agent.update(agent.sample(d, 0))
    assert torch.get_num_threads() == 1


def test_training_does_not_touch_global_randomness():
    torch.manual_seed(0)
    np.random.seed(0)
    a = torch.get_rng_state(), np.random.get_state()[1].copy()
    for kind in CONTINUOUS: make(kind, steps=2)
    make(policy="frs", steps=2).act(np.zeros(3), np.zeros(3))
    assert torch.equal(a[0], torch.get_rng_state()) and np.array_equal(a[1], np.random.get_state()[1])


# answers -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, discrete", CASES)
def test_actions_shapes_and_types(kind, discrete):
    agent = make(kind, discrete=discrete, steps=2)
    obs, goal, _ = ask(agent)
    many, one = agent.act(obs, goal), agent.act(obs[2], goal[2])
    assert isinstance(many, np.ndarray) and isinstance(one, np.ndarray)
    if discrete: assert many.shape == (5,) and one.shape == () and many.dtype == one.dtype == np.int64 and ((many >= 0) & (many < 4)).all()
    else: assert many.shape == (5, 2) and one.shape == (2,) and many.dtype == one.dtype == np.float32 and abs(many).max() <= 1
    assert np.array_equal(agent.act(torch.from_numpy(obs), goal.astype(float)), many)
    if kind != "gcfbc": assert np.allclose(one, many[2], atol=1e-6)
    noisy = [agent.act(obs, goal, deterministic=False, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert np.array_equal(noisy[0], noisy[1]) and (discrete or not np.array_equal(noisy[0], noisy[2]))


def test_gaussian_noise_is_standard_normal_then_clipped():
    agent = make(steps=1)
    obs, goal = np.zeros((4000, 3), "f4"), np.zeros((4000, 3), "f4")
    got = agent.act(obs, goal, deterministic=False, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)).numpy()
    mean = agent.nets["actor"](torch.zeros(1, 3), torch.zeros(1, 3)).detach().numpy()
    assert np.allclose(got, np.clip(mean + noise, -1, 1), atol=1e-5)


def test_categorical_sampling_follows_the_policy():
    agent = make(discrete=True, steps=30)
    obs = np.zeros((8000, 3), "f4")
    counts = np.bincount(agent.act(obs, obs, deterministic=False, generator=torch.Generator().manual_seed(0)), minlength=4) / 8000
    p = agent.nets["actor"](torch.zeros(1, 3), torch.zeros(1, 3)).softmax(1)[0].detach().numpy()
    assert abs(counts - p).max() < .03 and agent.act(obs[0], obs[0]) == p.argmax()


def test_rejection_sampling_keeps_the_best_sample():
    agent = make(policy="frs", num_samples=6, steps=3)
    obs, goal, _ = ask(agent)
    samples = agent.nets["actor"].sample(torch.from_numpy(obs), torch.from_numpy(goal), n=6, steps=2, generator=torch.Generator().manual_seed(0))
    for b in range(5):
        lowest = [float(agent.nets["critic"](torch.from_numpy(obs[b:b + 1]), torch.from_numpy(goal[b:b + 1]), a[None]).min().detach()) for a in samples[b]]
        assert np.allclose(agent.act(obs, goal)[b], samples[b, int(np.argmax(lowest))])
    assert np.array_equal(agent.act(obs, goal), agent.act(obs, goal, deterministic=False))                    # seed 0 in both modes
    assert not np.array_equal(agent.act(obs, goal), agent.act(obs, goal, generator=torch.Generator().manual_seed(9)))


@pytest.mark.parametrize("kind", ["trl", "td", "mc"])
@pytest.mark.parametrize("discrete", [False, True])
def test_value_and_distance_from_the_lowest_logit(kind, discrete):
    agent = make(kind, discrete=discrete, steps=4, n_members=3)
    obs, goal, act = ask(agent)
    logit = agent.critic_logits(*map(torch.from_numpy, (obs, act, goal))).detach().double().min(0).values
    value, distance = agent.value(obs, goal, act), agent.distance(obs, goal, act)
    assert value.dtype == distance.dtype == np.float32 and np.allclose(value, logit.sigmoid(), atol=1e-6) and np.allclose(distance, F.logsigmoid(logit) / math.log(.9), rtol=1e-4)
    assert np.allclose(agent.value(obs, goal), agent.value(obs, goal, agent.act(obs, goal)), atol=1e-6)
    assert agent.value(obs[0], goal[0]).shape == agent.distance(obs[0], goal[0], act[0]).shape == () and np.allclose(agent.value(obs[0], goal[0], act[0]), value[0], atol=1e-6)


def test_distance_of_extreme_logits():
    agent = make()
    for logit, steps in ((-1e4, 1e4 / -math.log(.9)), (200., 0.), (1e5, 0.), (-3e38, None)):
        agent._score = lambda obs, goal, action=None, frozen=False: torch.full((2, len(obs)), logit)
        d = agent.distance(np.zeros(3), np.zeros(3))
        assert np.isfinite(d) and d >= 0 and not np.signbit(d) and (steps is None or d == pytest.approx(steps, rel=1e-5))


def test_discrete_without_policy_takes_the_best_action():
    agent = make(discrete=True, policy="none", steps=4)
    obs, goal, _ = ask(agent)
    each = np.stack([agent.value(obs, goal, np.full(5, a)) for a in range(4)])
    assert np.allclose(agent.value(obs, goal), each.max(0), atol=1e-6) and agent.value(obs[0], goal[0]).shape == ()


@pytest.mark.parametrize("kind", ["trl", "gciql", "crl", "qrl"])
def test_no_policy(kind):
    agent = make(kind, policy="none", steps=2)
    obs, goal, act = ask(agent)
    assert np.isfinite(agent.value(obs, goal, act)).all() and "actor" not in agent.nets
    with pytest.raises(RuntimeError, match="policy='none'"): agent.act(obs, goal)
    if kind != "qrl":
        with pytest.raises(RuntimeError, match="policy='none'"): agent.value(obs, goal)


@pytest.mark.parametrize("name, bad, message", [
    ("obs", np.zeros(2), "obs has shape"), ("goal", np.zeros(4), "goal has shape"), ("obs", np.array([0, np.nan, 0]), "obs holds nan"), ("goal", np.array([0, np.inf, 0]), "goal holds inf"),
    ("obs", np.zeros((1, 1, 3)), "obs has shape"), ("action", np.zeros(3), "action has shape"), ("action", np.zeros((2, 2)), "action has shape"), ("action", np.array([np.nan, 0]), "action holds nan"),
])
def test_questions_refused(name, bad, message):
    agent, inputs = make(), dict(obs=np.zeros(3), goal=np.zeros(3), action=np.zeros(2)) | {name: bad}
    for method in (agent.value, agent.distance):
        with pytest.raises(ValueError, match=message): method(**inputs)
    if name != "action":
        inputs.pop("action")
        with pytest.raises(ValueError, match=message): agent.act(**inputs)


def test_one_goal_serves_many_observations_and_the_reverse():
    for agent in (make(steps=2), make("qrl", steps=2), make(oracle=True, policy="frs", steps=2), make(discrete=True, steps=2)):
        rng = np.random.default_rng(0)
        obs, goal = rng.standard_normal((4, 3)), rng.standard_normal((4, agent.goal_dim))
        for method in (agent.act, agent.value, agent.distance):
            assert np.array_equal(method(obs, goal[0]), method(obs, np.repeat(goal[:1], 4, 0)))
            assert np.array_equal(method(obs[0], goal), method(np.repeat(obs[:1], 4, 0), goal))
            assert method(obs[:1], goal[0]).shape == method(obs[:1], goal[:1]).shape
            with pytest.raises(ValueError, match="as many goals"): method(obs, goal[:2])
            with pytest.raises(ValueError, match="as many goals"): method(obs[:1], goal)


@pytest.mark.parametrize("action, message", [(4, "expected 0..3"), (-1, "expected 0..3"), (1.0, "expected integers"), ([1, 2], "action has shape")])
def test_discrete_actions_refused(action, message):
    with pytest.raises(ValueError, match=message): make(discrete=True).value(np.zeros(3), np.zeros(3), action)


# learning ----------------------------------------------------------------------------------------------------------------
def ring(n=6):
    walk = (np.arange(40)[:, None] + np.arange(n)).ravel() % n
    eye = np.eye(n, dtype=np.float32)
    return eye, TrajectoryDataset(eye[walk], np.zeros(len(walk), int), np.arange(len(walk)) % n == n - 1, n_actions=2)


@pytest.mark.parametrize("kind, tolerance", [("trl", .15), ("td", .15), ("mc", .1), ("gciql", .4), ("qrl", .4)])
def test_distances_on_a_ring(kind, tolerance):
    "From state 0 to state m it takes m steps."
    eye, d = ring()
    agent = AGENTS[kind].for_dataset(TRLConfig(discount=.9, expectile=.9, tau=.1, hidden=(24, 24), batch_size=96, lr=5e-3, policy="none"), d)
    agent.fit(d, 500)
    got = agent.distance(np.repeat(eye[:1], 4, 0), eye[1:5], np.zeros(4, int))
    assert np.median(abs(got / np.arange(1, 5) - 1)) < tolerance, got


def test_contrastive_scores_rank_the_future():
    eye, d = ring()
    agent = AGENTS["crl"].for_dataset(TRLConfig(discount=.5, hidden=(24, 24), batch_size=96, lr=5e-3, policy="none"), d)
    agent.fit(d, 300)
    score = agent.value(np.repeat(eye[:1], 5, 0), eye[1:], np.zeros(5, int))
    assert (np.diff(score[:4]) < 0).all(), score


@pytest.mark.parametrize("kind, policy", [("trl", "rpg"), ("mc", "rpg"), ("trl", "frs"), ("gcbc", "rpg"), ("gcfbc", "rpg"), ("gciql", "rpg"), ("crl", "rpg"), ("qrl", "rpg")])
def test_policies_walk_towards_the_goal(kind, policy):
    "A point on a line, walked from end to end both ways: the action's sign is the goal's side."
    x = np.concatenate([np.linspace(0, 1, 15), np.linspace(1, 0, 15)] * 6).astype("f4")[:, None]
    d = TrajectoryDataset(x, np.concatenate([np.full(15, .5), np.full(15, -.5)] * 6)[:, None], np.arange(len(x)) % 15 == 14)
    agent = AGENTS[kind].for_dataset(TRLConfig(discount=.9, expectile=.9, tau=.1, hidden=(24, 24), batch_size=64, lr=5e-3, alpha=3., policy=policy, num_samples=8, flow_steps=4), d)
    agent.fit(d, 200)
    a = agent.act(np.float32([[.2], [.8]]), np.float32([[.8], [.2]])).ravel()
    assert a[0] > .15 and a[1] < -.15, a


# baselines ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gcbc", "gcfbc"])
def test_cloning_has_no_values(kind):
    agent = make(kind, policy="none", steps=1)                    # it has a policy whatever the configuration says
    obs, goal, act = ask(agent)
    assert agent.act(obs, goal).shape == (5, 2) and set(agent.fit(data(), 1)[0]) == {"step", "actor_loss"}
    for method in (agent.value, agent.distance, lambda o, g, a: agent.critic_logits(o, a, g)):
        with pytest.raises(NotImplementedError, match="no values"): method(obs, goal, act)


def test_cloning_loss():
    agent, b = make("gcbc", steps=2), data().sample_transitive(16, .9, midpoint="end", rng=0)
    expected = -agent.nets["actor"].log_prob(b.obs, b.actor_goal, b.act).mean()
    assert agent.update(b)["actor_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_random_goals():
    d = data(oracle=True)
    b = d.sample_transitive(2000, .9, midpoint=1, rng=0)
    assert torch.equal(with_random_goals(b, d, 0., np.random.default_rng(0)).j, b.j)
    r = with_random_goals(b, d, .5, np.random.default_rng(0))
    assert .4 < float((r.j != b.j).float().mean()) < .55 and np.array_equal(r.goal.numpy(), d.oracle_reps[r.j]) and np.array_equal(r.goal_obs.numpy(), d.observations[r.j]) and torch.equal(r.k, b.k)


def test_implicit_q_learning_losses():
    agent, d = make("gciql", policy="none", expectile=.8, steps=4), data()
    b = agent.sample(d, 1)
    assert torch.equal(b.k, b.i + 1)
    with torch.no_grad():
        v = lambda o: agent.nets["state_value"](torch.cat([o, b.goal], 1))[0, :, 0]
        arrived = (b.k == b.j).float()
        y = -1 + .9 * (1 - arrived) * v(b.mid_obs)
        q, gap = agent.nets["critic"](b.obs, b.goal, b.act), agent.targets["critic"](b.obs, b.goal, b.act).min(0).values - v(b.obs)
    assert float(arrived.sum()) > 0
    metrics = agent.update(b)
    assert metrics["critic_loss"] == pytest.approx(float(((q - y) ** 2).mean()), rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(float((abs(.8 - (gap < 0).double()) * gap**2).mean()), rel=1e-4)


def test_implicit_q_learning_distance():
    agent = make("gciql", policy="none")
    obs, goal, act = ask(agent)
    for q, steps in ((-(1 - .9**7) / .1, 7.), (0., 0.), (3., 0.), (-1., 1.)):
        agent._score = lambda *a, frozen=False: torch.full((2, 5), q)
        d = agent.distance(obs, goal, act)
        assert np.allclose(d, steps, atol=1e-4) and not np.signbit(d).any() and np.allclose(agent.value(obs, goal, act), q)
    agent._score = lambda *a, frozen=False: torch.full((2, 5), -1e6)
    assert np.isfinite(agent.distance(obs, goal, act)).all()


def test_contrastive_loss():
    agent = make("crl", policy="none", steps=3)
    b = agent.sample(data(), 1)
    with torch.no_grad(): phi, psi = agent.nets["phi"](torch.cat([b.obs, b.act], 1)), agent.nets["psi"](b.goal)
    total = 0.
    for e in range(2):
        for i in range(16):
            for j in range(16):
                f = float(phi[e, i] @ psi[e, j]) / math.sqrt(8)
                total += math.log1p(math.exp(-f if i == j else f))
    assert agent.update(b)["critic_loss"] == pytest.approx(total / (2 * 16 * 16), rel=1e-4)
    obs, goal, act = ask(agent)
    with pytest.raises(NotImplementedError, match="steps"): agent.distance(obs, goal, act)
    assert agent.value(obs, goal, act).shape == (5,) and agent.critic_logits(*map(torch.from_numpy, (obs, act, goal))).shape == (2, 5)


def test_quasimetric_by_brute_force():
    x, y = torch.randn(2, 30, 3, 4, generator=torch.Generator().manual_seed(0))
    for mix in (0., .3, 1.):
        got = interval_quasimetric(x, y, torch.tensor(mix))
        for n in range(30):
            parts = []
            for c in range(3):
                spans, length, end = sorted((float(a), float(b)) for a, b in zip(x[n, c], y[n, c]) if a < b), 0., -math.inf
                for a, b in spans:
                    length += max(0., b - max(a, end))
                    end = max(end, b)
                parts.append(length)
            assert float(got[n]) == pytest.approx(mix * np.mean(parts) + (1 - mix) * max(parts), abs=1e-5)


def test_quasimetric_answers():
    agent = make("qrl", steps=4)
    obs, goal, act = ask(agent)
    d = agent.distance(obs, goal)
    assert (d >= 0).all() and np.allclose(agent.distance(obs, obs), 0) and np.allclose(agent.value(obs, goal), .9**d, atol=1e-6) and agent.value(obs, goal).dtype == np.float32
    third = ask(agent, seed=2)[0]
    assert (d <= agent.distance(obs, third) + agent.distance(third, goal) + 1e-4).all()
    by = agent.distance(obs, goal, act)
    assert (by >= 1).all() and np.allclose(agent.critic_logits(*map(torch.from_numpy, (obs, act, goal))).detach(), -by[None], atol=1e-5) and agent.distance(obs[0], goal[0]).shape == ()
    assert "psi" not in agent.nets and "psi" in make("qrl", oracle=True, steps=1).nets


# files -------------------------------------------------------------------------------------------------------------------
def test_saved_files(tmp_path):
    agent = make("td", steps=3)
    agent.save(tmp_path / "deep" / "agent")
    assert sorted(p.name for p in (tmp_path / "deep" / "agent").iterdir()) == ["config.json", "model.safetensors"] and [p.name for p in (tmp_path / "deep").iterdir()] == ["agent"]
    saved = json.loads((tmp_path / "deep" / "agent" / "config.json").read_text())
    assert saved["agent"] == "td" and saved["options"] == {"n": 2} and saved["steps_done"] == 3 and saved["config"]["hidden"] == [8, 8]
    assert NStepAgent.load(tmp_path / "deep" / "agent").n == 2 and isinstance(Agent.load(str(tmp_path / "deep" / "agent")), NStepAgent)
    assert TRLAgent.load(tmp_path / "deep" / "agent", device="cpu").config.device == "cpu"       # an n-step agent is a TRLAgent too


def test_saving_again_replaces(tmp_path):
    agent = make(steps=1)
    agent.save(tmp_path / "a")
    agent.fit(data(), 2)
    agent.save(tmp_path / "a")
    assert TRLAgent.load(tmp_path / "a").steps_done == 3 and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_foreign_folders_stay(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="no saved agent"): make().save(tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="no saved agent"): make().save(tmp_path / "file")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "x" and len(list(tmp_path.iterdir())) == 2


def test_failed_save_keeps_the_old_one(tmp_path, monkeypatch):
    agent = make(steps=1)
    agent.save(tmp_path / "a")
    agent.fit(data(), 1)
    def broken(*a): raise OSError("disk full")
    with monkeypatch.context() as m:
        m.setattr(safetensors.torch, "save_file", broken)
        with pytest.raises(OSError, match="disk full"): agent.save(tmp_path / "a")
    assert TRLAgent.load(tmp_path / "a").steps_done == 1 and [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("content, words", [("{}", "config.json lacks agent, config, .*sha256"), ("[]", "config.json holds a list"), ("3", "config.json holds a int")])
def test_empty_settings_are_named(tmp_path, content, words):
    make().save(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"folder=.*{words}"): TRLAgent.load(tmp_path / "a")


ABSENT = "cuda:77" if torch.cuda.is_available() else "cuda"   # a device that no machine of the tests has

def test_a_missing_device_is_named_in_one_line(tmp_path):
    make().save(tmp_path / "a")
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    calls = [lambda d: make(device=d), lambda d: TRLAgent(TRLConfig(**TINY, device=d), 3, action_dim=2), lambda d: TRLAgent.load(tmp_path / "a", device=d)]
    for call in calls:
        for device in (ABSENT, "meta"):
            with pytest.raises(ValueError, match=f"^device='{device}': .*expected a device of this machine") as error: call(device)
            assert "\n" not in str(error.value)
    (tmp_path / "a" / "config.json").write_text(json.dumps(saved | {"config": saved["config"] | {"device": ABSENT}}))
    with pytest.raises(ValueError, match=f"^device='{ABSENT}': "): TRLAgent.load(tmp_path / "a")
    assert TRLAgent.load(tmp_path / "a", device="cpu").config.device == "cpu"


@pytest.mark.parametrize("kind", ["trl", "td", "mc"])
def test_distilling_needs_oracle_representations(kind):
    config = TRLConfig(**TINY, oracle_distill=True)
    with pytest.raises(ValueError, match="oracle_distill=True.*oracle_reps"): AGENTS[kind].for_dataset(config, data())
    agent = AGENTS[kind](config, 3, action_dim=2)
    with pytest.raises(ValueError, match="oracle_distill=True.*oracle_reps"): agent.fit(data(), 1)
    assert agent.steps_done == 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "other weights", "no json", "json list", "unknown agent", "unknown field", "bad value", "other sizes", "no rng"])
def test_damaged_folders(tmp_path, damage):
    folder = tmp_path / "a"
    make(steps=1).save(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    blob, saved = weights.read_bytes(), json.loads(config.read_text())
    if damage == "truncated": weights.write_bytes(blob[:-7])
    if damage == "flipped": weights.write_bytes(blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:])
    if damage == "empty": weights.write_bytes(b"")
    if damage == "other weights":
        make(steps=2).save(tmp_path / "b")
        weights.write_bytes((tmp_path / "b" / "model.safetensors").read_bytes())
    if damage == "no json": config.write_text("{")
    if damage == "json list": config.write_text("[]")
    if damage == "unknown agent": config.write_text(json.dumps(saved | {"agent": "sac"}))
    if damage == "unknown field": config.write_text(json.dumps(saved | {"config": saved["config"] | {"warp": 1}}))
    if damage == "bad value": config.write_text(json.dumps(saved | {"config": saved["config"] | {"discount": 2}}))
    if damage == "other sizes": config.write_text(json.dumps(saved | {"config": saved["config"] | {"hidden": [8, 9]}}))
    if damage == "no rng": config.write_text(json.dumps({k: v for k, v in saved.items() if k != "rng"}))
    with pytest.raises(ValueError, match="folder="): TRLAgent.load(folder)


def test_missing_and_other_kinds(tmp_path):
    with pytest.raises(FileNotFoundError): TRLAgent.load(tmp_path / "none")
    make("crl", steps=1).save(tmp_path / "a")
    with pytest.raises(ValueError, match="kind 'crl'"): TRLAgent.load(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError): AGENTS["crl"].load(tmp_path / "a")


def test_read_only_rows_pass_without_a_warning(recwarn):
    agent = TRLAgent(TRLConfig(hidden=(8,), batch_size=4), 3, action_dim=2)
    row = np.zeros(3, np.float32)
    row.flags.writeable = False
    agent.act(row, row), agent.distance(row, row)
    assert not [w for w in recwarn if "writable" in str(w.message)]
