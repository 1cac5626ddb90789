//! `pipewright plan --workers … --schedule …`: the schedule and the number of micro-batches are chosen too.
use super::workers::{Found, Source, data_parallel_seconds, limits};
use crate::{
    Error, Result,
    pipeline::{
        planner::{Choice, Mode, Rival, Space, plan_jointly},
        profile::CostGraph,
        schedule::Kind,
        topology::Topology,
    },
};

#[derive(clap::Args)]
pub(super) struct SpaceOptions {
    /// With --workers: chooses the schedule too, of these, or of 1f1b and pipedream if it is `auto`, by the simulator
    #[arg(long, value_delimiter = ',', conflicts_with = "compat")]
    schedule: Vec<String>,
    /// With --schedule: the most weight versions that a worker may hold [default: no limit]
    #[arg(long)]
    versions: Option<usize>,
    /// With --schedule: the most updates between the weights that a gradient is made with and those that it changes [default: no limit]
    #[arg(long)]
    staleness: Option<usize>,
    /// With --schedule: the nodes that stages begin with, after the first stage
    #[arg(long, value_delimiter = ',')]
    cut: Vec<String>,
}

/// What was chosen beyond the stages.
#[derive(Clone, serde::Serialize)]
pub(super) struct Answer {
    schedule: String,
    micro_batches: usize,
    /// By stage, as is the staleness.
    weight_versions: Vec<usize>,
    staleness: Vec<usize>,
    #[serde(skip)]
    mode: Mode,
}

impl Answer {
    pub(super) fn mode(&self) -> Mode {
        self.mode
    }
}

/// What schedules are chosen from where none is named.
const SCHEDULES: [Kind; 2] = [Kind::OneFOneB, Kind::PipeDream];
/// The numbers of micro-batches, likewise.
const MICRO_BATCHES: [usize; 5] = [2, 4, 8, 16, 32];

impl SpaceOptions {
    pub(super) fn is_asked_for(&self) -> bool {
        !self.schedule.is_empty()
    }

    /// Refuses options that need others.
    pub(super) fn refuse(&self, needs: &str) -> Result<()> {
        let given = [
            ("--schedule", !self.schedule.is_empty()),
            ("--versions", self.versions.is_some()),
            ("--staleness", self.staleness.is_some()),
            ("--cut", !self.cut.is_empty()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(Error::config(format!("{name} needs {needs}"))),
            None => Ok(()),
        }
    }

    /// The schedules to choose from, with the numbers of micro-batches, none of which is above `most`.
    fn modes(&self, micro_batches: &[usize], most: usize) -> Result<Vec<Mode>> {
        let kinds = match &self.schedule[..] {
            [auto] if auto == "auto" => SCHEDULES.to_vec(),
            names => names.iter().map(|name| name.parse()).collect::<Result<_>>()?,
        };
        if let Some(m) = micro_batches.iter().find(|m| !(1..=most).contains(*m)) {
            return Err(Error::config(format!(
                "micro_batches: 1 to the {most} samples of a minibatch expected, got {m}"
            )));
        }
        let default: Vec<usize> = MICRO_BATCHES.into_iter().filter(|m| *m <= most).collect();
        let numbers = match micro_batches {
            [] if default.is_empty() => &[1],
            [] => &default[..],
            given => given,
        };
        let of = |schedule: Kind| {
            let numbers = if schedule.is_synchronous() { numbers.to_vec() } else { vec![1] };
            numbers.into_iter().map(move |micro_batches| Mode { schedule, micro_batches })
        };
        Ok(kinds.into_iter().flat_map(of).collect())
    }
}

/// Plans `graph`, which is what `source` is for whole minibatches but for inputs and results that nothing reads.
pub(super) fn plan(args: &super::Args, source: &Source, graph: &CostGraph, topology: &Topology) -> Result<Found> {
    let options = &args.replicated.jointly;
    let find = |name: &String| {
        let found = graph.nodes().iter().position(|n| n.name == *name);
        found.ok_or_else(|| Error::plan(format!("there is no node {name:?} to cut before")))
    };
    let cuts = options.cut.iter().map(find).collect::<Result<Vec<usize>>>()?;
    let space = Space {
        limits: limits(args),
        versions: options.versions,
        staleness: options.staleness,
        cuts: (!cuts.is_empty()).then_some(cuts),
        ..Space::of(options.modes(&args.micro_batches, source.most_micro_batches())?)
    };
    let graphs = |micro_batches| Ok(source.at(micro_batches)?.without_ends()?.graph);
    let (choice, others) = plan_jointly(&graphs, topology, &space)?;
    Ok(Found {
        seconds: choice.seconds,
        data_parallel_seconds: data_parallel_seconds(graph, topology)?,
        others: told(&choice, &others),
        chosen: Some(Answer {
            schedule: choice.mode.schedule.to_string(),
            micro_batches: choice.mode.micro_batches,
            weight_versions: choice.versions,
            staleness: choice.staleness,
            mode: choice.mode,
        }),
        stages: choice.stages,
        judged: choice.judged,
    })
}

/// What the choice takes longest for, and why it is none of the others.
fn told(choice: &Choice, others: &[Rival]) -> String {
    let numbers = |of: &[usize]| of.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "weight versions by stage: {}; staleness: {}\n{}\n",
        numbers(&choice.versions),
        numbers(&choice.staleness),
        choice.bottleneck
    );
    for Rival { mode, shape, seconds, is_simulated, why } in others {
        let least = if *is_simulated { "" } else { "at least " };
        text += &format!("not {shape} under {mode}, {least}{:.3} ms: {why}\n", 1e3 * seconds);
    }
    text
}
