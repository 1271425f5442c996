//! The faults of a chaos run, for server and network and for the workers.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

/// Defines the faults, and a list of them for each group to draw from.
macro_rules! faults {
    ($($(#[$about:meta])* $lane:ident: $($fault:ident),*;)*) => {
        /// A fault that the run can inject.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(super) enum Fault { $($($fault),*),* }

        $($(#[$about])* const $lane: &[Fault] = &[$(Fault::$fault),*];)*
    };
}

faults! {
    /// Faults of the server and the network.
    SERVER: KillCommandConnections, KillNoticeConnections, ForgetScripts, Cut, StallReplies,
        StallRequests, StallBoth, LoseReplies, DuplicateRequests, LoseNotices,
        DuplicateNotices, HalfOpen, Silence, Delay, PauseServer, PauseClients, OutOfMemory,
        ReadOnly, RestartServer;
    /// Faults of the server that lose its data. They are rare.
    LOSSES: FlushAll, RestartEmpty;
    /// Faults of a worker.
    WORKER: PauseWorker, KillWorker, ReplaceWorker;
}

impl Fault {
    pub(super) fn of_server(random: &mut StdRng) -> Self {
        let faults = if random.random_bool(0.02) { LOSSES } else { SERVER };
        faults[random.random_range(0..faults.len())]
    }

    pub(super) fn of_worker(random: &mut StdRng) -> Self {
        WORKER[random.random_range(0..WORKER.len())]
    }

    /// How long the fault lasts: mostly less than a lease, sometimes more than the
    /// longest lease.
    pub(super) fn lasts(self, random: &mut StdRng) -> Duration {
        let long = random.random_bool(0.15);
        Duration::from_millis(random.random_range(if long { 1_000..4_000 } else { 20..700 }))
    }
}

/// The time before the next fault of one of the two sequences, so that both together
/// have about this many per minute.
pub(super) fn quiet(random: &mut StdRng, per_minute: u64) -> Duration {
    let mean = 120_000 / per_minute.max(1);
    Duration::from_millis(random.random_range(mean / 10..mean * 19 / 10 + 1))
}
