//! The ranks there are, as planners see them: workers in groups, and which rank each of them is.
use super::{
    plan::Plan,
    topology::{Level, Link, Topology},
    transport::Together,
};
use crate::Result;
use std::fmt;

/// Planners number workers so that those of a host are neighbours, and put neighbouring stages on neighbouring workers. Ranks are
/// numbered as the launcher likes: with `mpirun --map-by node` neighbours are on different hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranks {
    /// The ranks of each host.
    hosts: Vec<Vec<usize>>,
    /// The slowest link within a host, and that between hosts.
    inside: Link,
    across: Link,
    /// Whether these were measured, and whether the ranks of a host share its links to others.
    is_measured: bool,
    is_shared: Option<bool>,
}

/// Hosts of which all orders are tried.
const ALL_ORDERS: usize = 5;

impl Ranks {
    /// Of ranks on these `hosts` ([`Transport::hosts`](super::transport::Transport::hosts)), any two of which have this link.
    pub fn alike(hosts: &[usize], link: Link) -> Ranks {
        let count = hosts.iter().max().map_or(0, |h| h + 1);
        let members = |host: usize| (0..hosts.len()).filter(|&r| hosts[r] == host).collect();
        let hosts = (0..count).map(members).collect();
        Ranks { hosts, inside: link, across: link, is_measured: false, is_shared: None }
    }

    /// Of ranks on these `hosts`, two of which have the link that `link` tells of them, if it does; `together` is what they move at
    /// once.
    pub fn measured(hosts: &[usize], link: &dyn Fn(usize, usize) -> Option<Link>, together: &[Together]) -> Ranks {
        let pairs = (0..hosts.len()).flat_map(|a| (a + 1..hosts.len()).map(move |b| (a, b)));
        let slowest = |same: bool| {
            let links = pairs.clone().filter(|&(a, b)| (hosts[a] == hosts[b]) == same).filter_map(|(a, b)| link(a, b));
            links.fold(Link::FREE, Link::and)
        };
        Ranks {
            inside: slowest(true),
            across: slowest(false),
            is_measured: true,
            is_shared: (!together.is_empty()).then(|| together.iter().any(Together::is_shared)),
            ..Ranks::alike(hosts, Link::FREE)
        }
    }

    /// The number of ranks.
    pub fn count(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// Whether their links were measured.
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// Of each host the number of ranks, if all have as many.
    fn each(&self) -> Option<usize> {
        let each = self.hosts.first()?.len();
        self.hosts.iter().all(|h| h.len() == each).then_some(each)
    }

    /// The levels that ranks of equal numbers on each host make: within a host, and between hosts. Where the numbers are unequal there
    /// is one level, all of whose links are taken for the slowest.
    ///
    /// # Errors
    /// As for [`Topology::new`].
    pub fn topology(&self) -> Result<Topology> {
        let (inside, across) = (self.inside, self.across);
        let levels = match (self.hosts.len(), self.each()) {
            (1, _) => vec![Level { count: self.count(), link: inside }],
            (hosts, Some(each)) if each > 1 => {
                vec![Level { count: each, link: inside }, Level { count: hosts, link: across }]
            }
            (hosts, Some(_)) => vec![Level { count: hosts, link: across }],
            (_, None) => vec![Level { count: self.count(), link: inside.and(across) }],
        };
        Topology::new(levels)
    }

    /// A plan in workers, in ranks: in the order that tears the fewest neighbours apart. One for more or fewer workers stays as it is.
    ///
    /// # Errors
    /// If two of its stages have a worker in common.
    pub fn place(&self, plan: Plan) -> Result<Plan> {
        match self.orders().into_iter().min_by_key(|order| order.torn(&plan)) {
            Some(order) if plan.workers() == self.count() => order.place(plan),
            _ => Ok(plan),
        }
    }

    /// The orders of ranks to choose from, in each of which those of a host are neighbours: where all hosts have as many ranks there
    /// is one, as they come. Else it matters which host comes first, and there are all orders of up to five hosts.
    pub fn orders(&self) -> Vec<Order<'_>> {
        let hosts: Vec<usize> = (0..self.hosts.len()).collect();
        let orders = match self.each() {
            None if hosts.len() <= ALL_ORDERS => permutations(&hosts),
            _ => vec![hosts],
        };
        let order = |hosts: Vec<usize>| {
            let of = |&host: &usize| self.hosts[host].iter().map(move |&rank| (rank, host));
            let (ranks, hosts) = hosts.iter().flat_map(of).unzip();
            Order { of: self, ranks, hosts }
        };
        orders.into_iter().map(order).collect()
    }
}

impl fmt::Display for Ranks {
    /// Such as `2 ranks on 2 hosts; between hosts 3.620e7 bytes/s and 81 µs`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, hosts) = (self.count(), self.hosts.len());
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        write!(f, "{ranks} rank{} on {hosts} host{}", plural(ranks), plural(hosts))?;
        if self.each().is_none() {
            let each: Vec<String> = self.hosts.iter().map(|h| h.len().to_string()).collect();
            write!(f, " of {} ranks", each.join(", "))?;
        }
        let link = |l: Link| format!("{:.3e} bytes/s and {:.0} µs", l.bandwidth, 1e6 * l.latency);
        if self.is_measured && self.hosts.iter().any(|h| h.len() > 1) {
            write!(f, "; within a host {}", link(self.inside))?;
        }
        if self.is_measured && hosts > 1 {
            write!(f, "; between hosts {}", link(self.across))?;
        }
        match self.is_shared {
            Some(true) => f.write_str(", shared by the ranks of a host"),
            Some(false) => f.write_str(" for each rank of a host"),
            None => Ok(()),
        }
    }
}

/// Which rank each worker is.
#[derive(Clone, Debug, PartialEq)]
pub struct Order<'a> {
    of: &'a Ranks,
    /// By worker, the rank,
    ranks: Vec<usize>,
    /// and its host.
    hosts: Vec<usize>,
}

impl Order<'_> {
    /// The link between two workers.
    pub fn link(&self, a: usize, b: usize) -> Link {
        let host = |w: usize| self.hosts.get(w);
        if host(a) == host(b) { self.of.inside } else { self.of.across }
    }

    /// How many borders between hosts the stages of a plan in workers lie across, or meet at.
    pub fn torn(&self, plan: &Plan) -> usize {
        let stages: Vec<&[usize]> = plan.stages().iter().map(|s| &s.workers[..]).collect();
        let differ =
            |a: &[usize], b: &[usize]| a.iter().any(|&a| b.iter().any(|&b| self.hosts.get(a) != self.hosts.get(b)));
        let within = stages.iter().filter(|s| differ(s, s)).count();
        within + stages.windows(2).filter(|s| differ(s[0], s[1])).count()
    }

    /// A plan in workers, in ranks.
    ///
    /// # Errors
    /// If it is not one for as many workers.
    pub fn place(&self, plan: Plan) -> Result<Plan> {
        plan.on(&self.ranks)
    }
}

/// All orders of some numbers, the given one first.
fn permutations(of: &[usize]) -> Vec<Vec<usize>> {
    if of.is_empty() {
        return vec![Vec::new()];
    }
    let begin = |at: usize| {
        let rest = [&of[..at], &of[at + 1..]].concat();
        permutations(&rest).into_iter().map(move |rest| [vec![of[at]], rest].concat())
    };
    (0..of.len()).flat_map(begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::{CrossEntropy, Graph, Linear, Relu};

    const FAST: Link = Link { latency: 1e-6, bandwidth: 5e9 };
    const SLOW: Link = Link { latency: 1e-4, bandwidth: 1e8 };

    /// Within a host the link is fast, but for one pair.
    fn on(hosts: &[usize]) -> Ranks {
        let link = |a: usize, b: usize| match hosts[a] == hosts[b] {
            true if (a, b) == (0, 2) => Some(Link { bandwidth: 4e9, ..FAST }),
            true => Some(FAST),
            false => Some(SLOW),
        };
        Ranks::measured(hosts, &link, &[])
    }

    fn level(count: usize, link: Link) -> Level {
        Level { count, link }
    }

    #[test]
    fn equal_hosts_make_levels() -> Result<()> {
        let levels = |hosts: &[usize]| Ok::<_, crate::Error>(on(hosts).topology()?.levels().to_vec());
        let inside = Link { bandwidth: 4e9, ..FAST };
        assert_eq!(levels(&[0, 1, 0, 1])?, [level(2, inside), level(2, SLOW)]);
        assert_eq!(levels(&[0, 1, 2])?, [level(3, SLOW)]);
        assert_eq!(levels(&[0, 0, 0])?, [level(3, inside)]);
        assert_eq!(levels(&[0])?, [level(1, Link::FREE)]);
        // Unequal ones: nothing faster is promised than what any pair has.
        assert_eq!(levels(&[0, 1, 0])?, [level(3, SLOW)]);
        assert_eq!(Ranks::alike(&[0, 1, 0, 1], FAST).topology()?.levels(), [level(2, FAST), level(2, FAST)]);
        Ok(())
    }

    /// Layers enough for any plan here.
    fn plan(replicas: &[usize]) -> Result<Plan> {
        let mut g = Graph::new();
        let (x, label) = (g.input("x", [4]), g.label("label"));
        let mut h = x;
        let mut cuts = Vec::new();
        for stage in 0..replicas.len() {
            h = g.add(Linear::new(4, 4), [h])?;
            if stage > 0 {
                cuts.push(h.node);
            }
            h = g.add(Relu, [h])?;
        }
        let loss = g.add(CrossEntropy::new(), [h, label])?;
        Plan::replicated(&g.with_loss(loss)?, &cuts, replicas)
    }

    /// Stages lie on neighbouring ranks of a host whatever the launcher's numbers, and what is together fits where hosts are unequal.
    #[test]
    fn neighbours_share_a_host() -> Result<()> {
        let placed = |hosts: &[usize], replicas: &[usize]| {
            let plan = on(hosts).place(plan(replicas)?)?;
            Ok::<_, crate::Error>(plan.stages().iter().map(|s| s.workers.clone()).collect::<Vec<_>>())
        };
        assert_eq!(placed(&[0, 1, 0, 1], &[1, 1, 1, 1])?, [[0], [2], [1], [3]]);
        assert_eq!(placed(&[0, 1, 0, 1], &[2, 2])?, [[0, 2], [1, 3]]);
        assert_eq!(placed(&[0, 0, 1, 1], &[1, 1, 1, 1])?, [[0], [1], [2], [3]]);
        assert_eq!(placed(&[0, 1, 2], &[1, 1, 1])?, [[0], [1], [2]]);
        assert_eq!(placed(&[0, 1, 1, 1], &[3, 1])?, [vec![1, 2, 3], vec![0]]);
        assert_eq!(placed(&[0, 1, 1, 1], &[1, 3])?, [vec![0], vec![1, 2, 3]]);
        assert_eq!(placed(&[0, 1, 2, 1, 1, 2], &[2, 3, 1])?, [vec![2, 5], vec![1, 3, 4], vec![0]]);
        // A plan for another number of workers is refused elsewhere.
        assert_eq!(placed(&[0, 1], &[1, 1, 1])?, [[0], [1], [2]]);
        // Going on with a plan that was placed on other hosts.
        let elsewhere = on(&[0, 1, 0, 1]).place(plan(&[2, 2])?)?;
        assert_eq!(on(&[0, 0, 1, 1]).place(elsewhere.renumbered()?)?, plan(&[2, 2])?);
        Ok(())
    }

    #[test]
    fn orders_are_told_apart_by_their_links() -> Result<()> {
        let ranks = on(&[0, 1, 1, 1]);
        let orders = ranks.orders();
        assert_eq!(orders.len(), 2);
        assert_eq!([(0, 1), (1, 2), (0, 3)].map(|(a, b)| orders[0].link(a, b)), [SLOW, FAST, SLOW]);
        assert_eq!([(0, 1), (1, 2), (2, 3)].map(|(a, b)| orders[1].link(a, b)), [FAST, FAST, SLOW]);
        // The first stage of 3-1 lies across both hosts, or the cut does.
        assert_eq!([orders[0].torn(&plan(&[3, 1])?), orders[1].torn(&plan(&[3, 1])?)], [2, 1]);
        Ok(())
    }

    #[test]
    fn what_is_sent_at_once_tells_whether_a_link_is_shared() {
        let sent = |pairs, alone, at_once| Together { hosts: [0, 1], pairs, alone, at_once };
        assert!(
            sent(2, 100.0, 98.0).is_shared() && sent(2, 100.0, 130.0).is_shared() && sent(4, 100.0, 210.0).is_shared()
        );
        assert!(!sent(2, 100.0, 190.0).is_shared() && !sent(4, 100.0, 290.0).is_shared());
        let link = |_, _| Some(SLOW);
        let said = |together: &[Together]| Ranks::measured(&[0, 1, 0, 1], &link, together).to_string();
        let words =
            "4 ranks on 2 hosts; within a host 1.000e8 bytes/s and 100 µs; between hosts 1.000e8 bytes/s and 100 µs";
        assert_eq!(said(&[]), words);
        assert_eq!(said(&[sent(2, 1e8, 1e8)]), format!("{words}, shared by the ranks of a host"));
        assert_eq!(said(&[sent(2, 1e8, 2e8)]), format!("{words} for each rank of a host"));
        assert_eq!(Ranks::alike(&[0, 1, 1], FAST).to_string(), "3 ranks on 2 hosts of 1, 2 ranks");
        assert_eq!(Ranks::alike(&[0], FAST).to_string(), "1 rank on 1 host");
    }
}
