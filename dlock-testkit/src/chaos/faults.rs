//! The faults: what is done to server and network, and what to the workers.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Fault {
    // to the server and the network
    KillCommandConnections,
    KillNoticeConnections,
    ForgetScripts,
    Cut,
    StallReplies,
    StallRequests,
    StallBoth,
    LoseReplies,
    DuplicateRequests,
    LoseNotices,
    DuplicateNotices,
    HalfOpen,
    Silence,
    Delay,
    PauseServer,
    PauseClients,
    OutOfMemory,
    ReadOnly,
    RestartServer,
    // the same, and the data is lost
    FlushAll,
    RestartEmpty,
    // to a worker
    PauseWorker,
    KillWorker,
    ReplaceWorker,
}

use Fault::*;

/// What the server's lane draws from; the loss of data is rare.
const SERVER: [Fault; 19] = [
    KillCommandConnections,
    KillNoticeConnections,
    ForgetScripts,
    Cut,
    StallReplies,
    StallRequests,
    StallBoth,
    LoseReplies,
    DuplicateRequests,
    LoseNotices,
    DuplicateNotices,
    HalfOpen,
    Silence,
    Delay,
    PauseServer,
    PauseClients,
    OutOfMemory,
    ReadOnly,
    RestartServer,
];
const LOSSES: [Fault; 2] = [FlushAll, RestartEmpty];
const WORKER: [Fault; 4] = [PauseWorker, PauseWorker, KillWorker, ReplaceWorker];

impl Fault {
    pub(super) fn of_server(random: &mut StdRng) -> Self {
        let faults: &[Fault] = if random.random_bool(0.02) { &LOSSES } else { &SERVER };
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
