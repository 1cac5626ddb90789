//! How the workers of a stage bring their gradients together: what they may be told.
use crate::{Error, Result, tensor::DType};
use std::{fmt, str::FromStr};

/// Who adds up what, and in which order messages go. All of them move the bytes of a ring (Patarasuk and Yuan 2009), 2(R−1)/R of
/// the gradients in and out of every worker, in fewer steps than its 2(R−1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllReduce {
    /// [`TwoLevel`](AllReduce::TwoLevel) where the workers are on hosts with as many of them each, several of both; else
    /// [`Direct`](AllReduce::Direct).
    #[default]
    Auto,
    /// Every worker sends each part to the one that adds it up, which sends the sum to all: 2 steps. Parts are added up in the
    /// order of micro-batches.
    Direct,
    /// Over half, a quarter, … of the workers, and back: 2·log₂R steps, as many messages. R must be a power of two.
    Halving,
    /// First among the workers of a host, then what each of them has added up across hosts: of each host only
    /// 2(H−1)/H of the gradients pass its link, however many workers it has.
    TwoLevel,
}

impl AllReduce {
    /// Their names.
    pub const ALL: [(&'static str, AllReduce); 4] = [
        ("auto", AllReduce::Auto),
        ("direct", AllReduce::Direct),
        ("halving", AllReduce::Halving),
        ("two-level", AllReduce::TwoLevel),
    ];

    /// For worker `me` of those that are on these `hosts`, its group at each level, ascending: it adds up what the workers of its group
    /// have of a part of what it added up before. With `in_order` gradients are to be added up in the order of micro-batches, which
    /// only [`Direct`](AllReduce::Direct) does.
    ///
    /// # Errors
    /// If that is not possible on so many workers, or so many of each host.
    pub fn levels(self, hosts: &[usize], me: usize, in_order: bool) -> Result<Vec<Vec<usize>>> {
        let count = hosts.len();
        let refuse = |what: String| Err(Error::config(format!("all_reduce: {what}")));
        if in_order && !matches!(self, AllReduce::Auto | AllReduce::Direct) {
            return refuse("direct expected in a deterministic run, whose gradients are added up in one order".into());
        }
        let of_host = |host: usize| (0..count).filter(|&q| hosts[q] == host).collect::<Vec<_>>();
        let mut different: Vec<usize> = hosts.to_vec();
        different.sort_unstable();
        different.dedup();
        let groups: Vec<Vec<usize>> = different.iter().map(|&h| of_host(h)).collect();
        let each = groups.first().map_or(0, Vec::len);
        let is_two_level = groups.len() > 1 && each > 1 && groups.iter().all(|g| g.len() == each);
        match self {
            AllReduce::Auto if is_two_level && !in_order => AllReduce::TwoLevel.levels(hosts, me, in_order),
            AllReduce::Auto | AllReduce::Direct => Ok(vec![(0..count).collect()]),
            AllReduce::Halving if count.is_power_of_two() => {
                let group = |distance: usize| vec![me & !distance, me | distance];
                Ok((0..count.ilog2()).rev().map(|bit| group(1 << bit)).collect())
            }
            AllReduce::Halving => refuse(format!("halving needs stages on 2, 4, 8, … workers, one is on {count}")),
            AllReduce::TwoLevel if is_two_level => {
                let mine = groups.into_iter().find(|g| g.contains(&me)).unwrap_or_default();
                let place = mine.iter().position(|&q| q == me).unwrap_or(0);
                let across = different.iter().map(|&h| of_host(h)[place]).collect();
                Ok(vec![mine, across])
            }
            AllReduce::TwoLevel => {
                let counts: Vec<usize> = groups.iter().map(Vec::len).collect();
                refuse(format!(
                    "two-level needs stages on two or more hosts with as many workers each, two or more; one has {counts:?}"
                ))
            }
        }
    }
}

impl fmt::Display for AllReduce {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(AllReduce::ALL.iter().find(|(_, a)| a == self).map_or("", |(name, _)| name))
    }
}

impl FromStr for AllReduce {
    type Err = Error;

    fn from_str(text: &str) -> Result<AllReduce> {
        let found = AllReduce::ALL.into_iter().find(|(name, _)| *name == text);
        let names = AllReduce::ALL.map(|(name, _)| name).join(", ");
        found.map(|(_, a)| a).ok_or_else(|| Error::config(format!("all_reduce: one of {names} expected, got {text:?}")))
    }
}

/// What gradients are made smaller by before they are sent to other workers of their stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Nothing.
    #[default]
    None,
    /// Rounded to the upper half of an f32, there and back.
    Bf16,
    /// Matrices of so low a rank, with what they leave out added to the next gradient (PowerSGD, Vogels et al. 2019).
    PowerSgd {
        /// The rank.
        rank: usize,
    },
}

impl Compression {
    /// What numbers travel as.
    pub fn wire(self, dtype: DType) -> DType {
        if self == Compression::Bf16 { DType::BF16 } else { dtype }
    }

    /// Numbers of a parameter of this shape that a worker sends in place of each of the gradients: as many as it has, or those of
    /// two factors.
    pub fn elements(self, shape: &[usize]) -> usize {
        match self {
            Compression::PowerSgd { rank } => match factors(shape, rank) {
                Some([rows, columns, rank]) => (rows + columns) * rank,
                None => shape.iter().product(),
            },
            Compression::None | Compression::Bf16 => shape.iter().product(),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Compression::None => f.write_str("none"),
            Compression::Bf16 => f.write_str("bf16"),
            Compression::PowerSgd { rank } => write!(f, "powersgd:{rank}"),
        }
    }
}

impl FromStr for Compression {
    type Err = Error;

    fn from_str(text: &str) -> Result<Compression> {
        let wrong =
            || Error::config(format!("compress_gradients: none, bf16, or powersgd:RANK expected, got {text:?}"));
        match text.split_once(':') {
            None if text == "none" => Ok(Compression::None),
            None if text == "bf16" => Ok(Compression::Bf16),
            Some(("powersgd", rank)) => {
                let rank = rank.parse().ok().filter(|&rank| rank > 0);
                rank.map(|rank| Compression::PowerSgd { rank }).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

/// A parameter of this shape as a matrix, its two sides as equal as may be, and the rank of its factors, where these are smaller than
/// it: rows, columns, rank.
pub(super) fn factors(shape: &[usize], rank: usize) -> Option<[usize; 3]> {
    let sides = |cut: usize| (shape[..cut].iter().product::<usize>(), shape[cut..].iter().product::<usize>());
    let (rows, columns) = (1..shape.len()).map(sides).min_by_key(|&(a, b)| a.max(b))?;
    let rank = rank.min(rows).min(columns);
    ((rows + columns) * rank < rows * columns).then_some([rows, columns, rank])
}

/// Part number `place` of `of` equal ones of `elements` elements: where it begins, and how long it is.
pub(super) fn split(elements: usize, place: usize, of: usize) -> (usize, usize) {
    let start = elements * place / of;
    (start, elements * (place + 1) / of - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_all_workers_fit_together() {
        let hosts = [0, 1, 0, 1, 2, 2];
        let two = |me| AllReduce::TwoLevel.levels(&hosts, me, false).expect("three hosts of two");
        assert_eq!(two(3), [vec![1, 3], vec![2, 3, 5]]);
        assert_eq!(two(4), [vec![4, 5], vec![0, 1, 4]]);
        assert_eq!(AllReduce::Auto.levels(&hosts, 3, false).expect("two levels"), two(3));
        assert_eq!(AllReduce::Auto.levels(&hosts, 3, true).expect("one level"), [vec![0, 1, 2, 3, 4, 5]]);
        assert_eq!(AllReduce::Auto.levels(&[0, 0, 1], 2, false).expect("one level"), [vec![0, 1, 2]]);
        assert_eq!(AllReduce::Halving.levels(&[0; 8], 5, false).expect("8"), [vec![1, 5], vec![5, 7], vec![4, 5]]);
        for (all_reduce, hosts, in_order, words) in [
            (AllReduce::Halving, &[0, 0, 0][..], false, "2, 4, 8, … workers, one is on 3"),
            (AllReduce::TwoLevel, &[0, 0, 1], false, "[2, 1]"),
            (AllReduce::TwoLevel, &[0, 1], false, "[1, 1]"),
            (AllReduce::TwoLevel, &[0, 1, 0, 1], true, "direct expected"),
        ] {
            let said = all_reduce.levels(hosts, 0, in_order).expect_err("no such").to_string();
            assert!(said.contains(words), "{words:?} expected in {said:?}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, all_reduce) in AllReduce::ALL {
            assert_eq!(name.parse::<AllReduce>().ok(), Some(all_reduce));
            assert_eq!(all_reduce.to_string(), name);
        }
        for compression in [Compression::None, Compression::Bf16, Compression::PowerSgd { rank: 4 }] {
            assert_eq!(compression.to_string().parse::<Compression>().ok(), Some(compression));
        }
        for wrong in ["", "powersgd", "powersgd:0", "powersgd:-1", "fp8", "bf16:2"] {
            assert!(wrong.parse::<Compression>().is_err(), "{wrong:?}");
        }
        assert!("ring".parse::<AllReduce>().is_err());
    }

    #[test]
    fn only_what_becomes_smaller_is_factored() {
        assert_eq!(factors(&[3, 3, 64, 128], 4), Some([576, 128, 4]));
        assert_eq!(factors(&[100, 90], 200), None);
        assert_eq!((factors(&[512], 2), factors(&[2, 2], 1), factors(&[], 1)), (None, None, None));
        assert_eq!(Compression::PowerSgd { rank: 2 }.elements(&[10, 20]), 60);
        assert_eq!(Compression::Bf16.elements(&[10, 20]), 200);
    }
}
