//! Virtual clocks, and what happens when.

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::super::quorum::{NodeReply, NodeRequest};

/// A clock that is apart from the others and runs at its own rate.
#[derive(Clone, Copy)]
pub(super) struct DriftingClock {
    start: u64,
    rate: f64,
}

impl DriftingClock {
    pub(super) fn new(random: &mut StdRng, start: u64) -> Self {
        let start = start + random.random_range(0..400_000);
        DriftingClock { start, rate: random.random_range(0.991..1.009) }
    }

    pub(super) fn at(self, time: u64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a simulated clock"
        )]
        let run = (time as f64 * self.rate) as u64;
        self.start + run
    }

    /// When it shows this.
    pub(super) fn when(self, shown: u64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a simulated clock"
        )]
        let time = (shown.saturating_sub(self.start) as f64 / self.rate) as u64;
        time
    }
}

/// Something that happens.
pub(super) enum Event {
    /// A request arrives at a node that was started this often.
    Arrives {
        client: usize,
        node: usize,
        boot: u32,
        round: u64,
        ask: NodeRequest,
    },
    Answers {
        client: usize,
        node: usize,
        round: u64,
        reply: NodeReply,
    },
    TimesOut {
        client: usize,
        round: u64,
    },
    /// The client does what it does next, if it is still in this phase.
    Acts {
        client: usize,
        phase: u64,
    },
    Fault,
}

/// When something happens; what was planned first happens first.
pub(super) struct Queued {
    pub(super) at: u64,
    pub(super) order: u64,
    pub(super) event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
