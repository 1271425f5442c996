//! The faults: what is done to server and network, and what to the workers.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

/// Writes the faults and, for each lane, what is drawn from.
macro_rules! faults {
    ($($(#[$about:meta])* $lane:ident: $($fault:ident),*;)*) => {
        /// One thing that goes wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(super) enum Fault { $($($fault),*),* }

        $($(#[$about])* const $lane: &[Fault] = &[$(Fault::$fault),*];)*
    };
}

faults! {
    /// To the server and the network.
    SERVER: KillCommandConnections, KillNoticeConnections, ForgetScripts, Cut, StallReplies,
        StallRequests, StallBoth, LoseReplies, DuplicateRequests, LoseNotices,
        DuplicateNotices, HalfOpen, Silence, Delay, PauseServer, PauseClients, OutOfMemory,
        ReadOnly, RestartServer;
    /// The same, and the data is lost: rare.
    LOSSES: FlushAll, RestartEmpty;
    /// To a worker.
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

    /// How long it lasts: mostly less than a lease, sometimes more than the longest.
    pub(super) fn lasts(self, random: &mut StdRng) -> Duration {
        let long = random.random_bool(0.15);
        Duration::from_millis(random.random_range(if long { 1_000..4_000 } else { 20..700 }))
    }
}

/// The quiet time before the next one in a lane, of two, so that there are about
/// so many in a minute.
pub(super) fn quiet(random: &mut StdRng, per_minute: u64) -> Duration {
    let mean = 120_000 / per_minute.max(1);
    Duration::from_millis(random.random_range(mean / 10..mean * 19 / 10 + 1))
}
