//! Dynamic programming over cuts, from the last stage to the first.
use super::{
    cost::{Part, all_reduce, link_among, seconds_per_byte},
    cuts::Cut,
    mode::Mode,
};
use crate::pipeline::topology::{Link, Topology, Worker};

/// What is sought, least first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    /// Seconds of the slowest stage or edge.
    Fastest,
    /// Workers, then stages, then bytes of the worker that holds the most.
    Leanest,
    /// Bytes of the worker that holds the most, whatever it has room for.
    Smallest,
    /// Seconds that a micro-batch alone takes from the first stage to the last and back, more than on one worker: of its messages.
    Nearest,
}

/// What a plan may not exceed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caps {
    /// Seconds of a stage or edge.
    pub(super) seconds: f64,
    /// Bytes of a worker.
    pub(super) memory: f64,
    /// One worker a stage.
    pub(super) straight: bool,
}

/// What some stages come to, as the goal has it: seconds, or stages and bytes, or bytes.
type Worth = (f64, f64);

/// No such stages.
const NONE: Worth = (f64::INFINITY, f64::INFINITY);

/// The best stages behind a cut: what they come to, where the first of them ends, and how many replicas the one after it has.
#[derive(Clone, Copy)]
struct Best {
    worth: Worth,
    end: u32,
    next: u32,
}

/// A graph and the workers that it is planned for, in an order. Stages take workers that are neighbours in it, the last stage the last
/// ones.
pub(super) struct Sweeper<'a> {
    pub(super) cuts: &'a [Cut],
    topology: &'a Topology,
    workers: usize,
    /// For each cut those that it is within, except itself.
    beyond: Vec<Vec<u32>>,
    order: &'a [usize],
    mode: Mode,
    /// What a stage of r replicas with u workers behind it runs on is number `kind[r][u]` of `kinds`: the slowest link among its
    /// workers, and their least speed. The least memory of one of them is `memory[r][u]`.
    kind: Vec<Vec<usize>>,
    kinds: Vec<(Link, f64)>,
    memory: Vec<Vec<f64>>,
    /// The speed of the fastest worker.
    fastest: f64,
    /// Seconds that a byte takes from a stage of r replicas to one of q, with u workers from that one on: `edges[u][r][q]`.
    edges: Vec<Vec<Vec<f64>>>,
    /// The slowest link between their workers, likewise.
    links: Vec<Vec<Vec<Link>>>,
}

/// The best stages behind each cut, on each number of workers and with each number of replicas of the first of them.
pub(super) struct Swept {
    best: Vec<Best>,
    workers: usize,
}

/// The best stages behind each cut with the edge to them from a stage of r replicas: at `[cut][r][workers]`.
struct Joined {
    best: Vec<Best>,
    /// For which numbers of workers there are any: a bit each, at `[cut][r]`. A stage before them leaves 127 at most.
    is_there: Vec<u128>,
}

/// More than the sums over stages are rounded by, as a part of them.
const ROUNDING: f64 = 1e-12;

/// At `[u][r][q]` what there is from a stage of r replicas to one of q, with u workers from that one on; `none` where there is none.
fn table<T: Copy>(workers: usize, none: T, of: &dyn Fn(usize, usize, usize) -> T) -> Vec<Vec<Vec<T>>> {
    let row = |u: usize, r: usize| match r {
        0 => Vec::new(),
        _ => (0..=u).map(|q| if q == 0 { none } else { of(u, r, q) }).collect(),
    };
    (0..=workers).map(|u| (0..=workers - u).map(|r| row(u, r)).collect()).collect()
}

/// The bits of the numbers up to `n`, below 128.
fn up_to(n: usize) -> u128 {
    u128::MAX >> (127 - n)
}

impl<'a> Sweeper<'a> {
    /// `is_fixed`: a stage between any two neighbouring cuts.
    pub(super) fn new(
        mode: Mode,
        cuts: &'a [Cut],
        topology: &'a Topology,
        order: &'a [usize],
        is_fixed: bool,
    ) -> Sweeper<'a> {
        let workers = topology.workers();
        let beyond = |i: usize| {
            let is_beyond = |&k: &usize| cuts[i].nodes.is_within(&cuts[k].nodes);
            let most = if is_fixed { (i + 2).min(cuts.len()) } else { cuts.len() };
            (i + 1..most).filter(is_beyond).map(|k| k as u32).collect()
        };
        let mut kinds: Vec<(Link, f64)> = Vec::new();
        let (mut kind, mut memory) = (vec![Vec::new()], vec![Vec::new()]);
        for r in 1..=workers {
            let stage = |u: usize| &order[workers - u - r..workers - u];
            let least = |u: usize, of: fn(Worker) -> f64| {
                stage(u).iter().map(|&w| of(topology.worker(w))).fold(f64::INFINITY, f64::min)
            };
            let mut number = |u: usize| {
                let here = (link_among(topology, stage(u)), least(u, |w| w.speed));
                kinds.iter().position(|k| *k == here).unwrap_or_else(|| {
                    kinds.push(here);
                    kinds.len() - 1
                })
            };
            kind.push((0..=workers - r).map(&mut number).collect());
            memory.push((0..=workers - r).map(|u| least(u, |w| w.memory)).collect());
        }
        let fastest = order.iter().map(|&w| topology.worker(w).speed).fold(0.0, f64::max);
        let edges = table(workers, 0.0, &|u, r, q| {
            let start = workers - u;
            seconds_per_byte(topology, &order[start - r..start], &order[start..start + q])
        });
        let links = table(workers, Link::FREE, &|u, r, q| {
            let start = workers - u;
            link_among(topology, &order[start - r..start + q])
        });
        let beyond = (0..cuts.len()).map(beyond).collect();
        Sweeper { cuts, topology, workers, beyond, order, mode, kind, kinds, memory, fastest, edges, links }
    }

    /// The best stages within `caps`.
    pub(super) fn sweep(&self, goal: Goal, caps: Caps) -> Swept {
        let Caps { seconds, memory, straight } = caps;
        let (n, last) = (self.workers, self.cuts.len() - 1);
        let none = Best { worth: NONE, end: 0, next: 0 };
        let mut swept = Swept { best: vec![none; self.cuts.len() * (n + 1) * (n + 1)], workers: n };
        let nothing = swept.at(last, 0, 0);
        swept.best[nothing].worth = (0.0, 0.0);
        let mut joined = Joined { best: vec![none; swept.best.len()], is_there: vec![0; self.cuts.len() * (n + 1)] };
        self.join(&swept, last, goal, seconds, &mut joined);
        let most = if straight { 1 } else { n };
        let mut times = vec![0.0; self.kinds.len()];
        let room = |r: usize, u: usize| {
            if goal == Goal::Smallest { f64::INFINITY } else { memory.min(self.memory[r][u]) }
        };
        // The fewest workers that are quick enough for so many seconds of computation.
        let fewest = |work: f64| (work / self.fastest / seconds * (1.0 - ROUNDING)).ceil() as usize;
        for i in (0..last).rev() {
            let front = if i == 0 { 0 } else { fewest(self.cuts[i].held.work()).max(1) };
            for &k in &self.beyond[i] {
                let k = k as usize;
                let part = self.cuts[k].held.less(&self.cuts[i].held);
                for r in fewest(part.work()).max(1)..=most.min(n.saturating_sub(front)) {
                    let mut behind = joined.is_there[k * (n + 1) + r] & up_to(n - r - front);
                    if behind == 0 {
                        continue;
                    }
                    for (time, &(link, speed)) in times.iter_mut().zip(&self.kinds) {
                        *time = part.seconds(self.mode, r, all_reduce(r, part.param_bytes, link), speed);
                    }
                    while behind != 0 {
                        let u = behind.trailing_zeros() as usize;
                        behind &= behind - 1;
                        let rest = &joined.best[swept.at(k, r, u)];
                        let time = times[self.kind[r][u]];
                        // Its warm-up is ⌊(u + r - 1) / r⌋.
                        let held = part.memory(self.mode, self.cuts[i].crossing, u.div_ceil(r), r);
                        if time > seconds || held > room(r, u) {
                            continue;
                        }
                        let worth = match goal {
                            Goal::Fastest => (rest.worth.0.max(time), 0.0),
                            Goal::Leanest => (rest.worth.0 + 1.0, rest.worth.1.max(held)),
                            Goal::Smallest => (rest.worth.0.max(held), 0.0),
                            Goal::Nearest => rest.worth,
                        };
                        let at = swept.at(i, u + r, r);
                        if worth < swept.best[at].worth {
                            swept.best[at] = Best { worth, end: k as u32, next: rest.next };
                        }
                    }
                }
            }
            self.join(&swept, i, goal, seconds, &mut joined);
        }
        swept
    }

    /// Puts an edge before the stages behind `cut`.
    fn join(&self, swept: &Swept, cut: usize, goal: Goal, seconds: f64, joined: &mut Joined) {
        let (n, bytes) = (self.workers, self.cuts[cut].crossing);
        for u in 0..=n {
            for r in 1..self.edges[u].len() {
                let mut found = Best { worth: NONE, end: 0, next: 0 };
                for q in 0..self.edges[u][r].len() {
                    let best = &swept.best[swept.at(cut, u, q)];
                    let time = bytes * self.edges[u][r][q];
                    if best.worth == NONE || time > seconds {
                        continue;
                    }
                    let worth = match goal {
                        Goal::Fastest => (best.worth.0.max(time), 0.0),
                        Goal::Nearest if q > 0 => {
                            let link = self.links[u][r][q];
                            (best.worth.0 + 2.0 * (link.latency + bytes / link.bandwidth), 0.0)
                        }
                        _ => best.worth,
                    };
                    if worth < found.worth {
                        found = Best { worth, end: 0, next: q as u32 };
                    }
                }
                if found.worth != NONE {
                    joined.best[swept.at(cut, r, u)] = found;
                    joined.is_there[cut * (n + 1) + r] |= 1 << u;
                }
            }
        }
    }

    /// The stages of the best plan on `workers` workers whose first stage has `replicas`.
    pub(super) fn stages(&self, swept: &Swept, workers: usize, replicas: usize) -> Vec<Part> {
        // Whole groups of the outermost level in front that nobody needs may as well be the last ones, if they are alike.
        let group = self.topology.group(self.topology.levels().len() - 1);
        let unused = if self.topology.is_even() { (self.workers - workers) / group * group } else { 0 };
        let (mut i, mut u, mut r) = (0, workers, replicas);
        let mut stages = Vec::new();
        while u > 0 {
            let best = &swept.best[swept.at(i, u, r)];
            let start = self.workers - u - unused;
            let end = best.end as usize;
            let nodes = self.cuts[end].nodes.iter().filter(|&n| !self.cuts[i].nodes.has(n)).collect();
            stages.push(Part { nodes, workers: self.order[start..start + r].to_vec() });
            (i, u, r) = (end, u - r, best.next as usize);
        }
        stages
    }
}

impl Swept {
    fn at(&self, cut: usize, a: usize, b: usize) -> usize {
        (cut * (self.workers + 1) + a) * (self.workers + 1) + b
    }

    /// What the best plan comes to for each number of workers and replicas of the first stage that there is one for.
    pub(super) fn plans(&self) -> impl Iterator<Item = (Worth, usize, usize)> + '_ {
        let all = (1..=self.workers).flat_map(|u| (1..=u).map(move |r| (u, r)));
        all.map(|(u, r)| (self.best[self.at(0, u, r)].worth, u, r)).filter(|p| p.0 != NONE)
    }
}
