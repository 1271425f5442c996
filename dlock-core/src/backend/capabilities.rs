//! What a backend can do.

use std::time::Duration;

use crate::config::{MAX_TTL, MIN_TTL};

/// Together with `MAX_HANDOVER_TIME`: a contended lock is handed over often enough to hide
/// the network latency, and other processes wait some milliseconds at most.
const MAX_HANDOVERS: u32 = 64;
const MAX_HANDOVER_TIME: Duration = Duration::from_millis(5);

/// One batch is worked on by the backend while the next is on its way.
const IN_FLIGHT: usize = 2;

/// What a backend can do. What it cannot is answered with `Unsupported`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Short name, as in the URL.
    pub name: &'static str,
    /// Claims in [`Mode::Shared`](crate::Mode::Shared).
    pub shared: bool,
    /// Claims in [`Mode::Permits`](crate::Mode::Permits).
    pub permits: bool,
    /// Queued claims are served first come, first served, over all processes.
    pub fifo: bool,
    /// [`Release::After`](super::Release::After).
    pub release_after: bool,
    /// [`Backend::list`](super::Backend::list) and [`Backend::break_lock`](super::Backend::break_lock).
    pub operators: bool,
    /// [`Backend::inspect`](super::Backend::inspect) tells who waits.
    pub waiters: bool,
    /// Calls go through a network: they run on the driver's thread, with time-outs.
    /// If not, every call must be [answered](super::Call::answered) at once; one that is
    /// under way counts as not answered. It is made while the client has a lock of its
    /// own, so it must not use the client, nor wait for a thread that does.
    pub remote: bool,
    /// The largest number of calls in one round trip of
    /// [`Backend::call`](super::Backend::call); 1 if batching does not help.
    pub max_batch: usize,
    /// How many batches of combined calls are in flight in each partition.
    pub in_flight: usize,
    /// The ttl that locks can have.
    pub ttl: TtlSupport,
    /// The default of [`max_handovers`](crate::Config::max_handovers).
    pub max_handovers: u32,
    /// The default of [`max_handover_time`](crate::Config::max_handover_time).
    pub max_handover_time: Duration,
}

/// The ttl that the locks of a store can have. Nobody gets a shorter one than was asked
/// for: it is rounded up, or the lock is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TtlSupport {
    /// Each lock has its own.
    PerLock {
        /// A shorter ttl is rounded up to this one.
        min: Duration,
        /// A longer ttl is refused.
        max: Duration,
    },
    /// All locks of a client live by one session.
    PerSession {
        /// The ttl of the session: a shorter one is rounded up to it, a longer one is
        /// refused.
        ttl: Duration,
    },
}

impl TtlSupport {
    /// Every ttl that a lock may ask for.
    pub const ANY: TtlSupport = TtlSupport::PerLock { min: MIN_TTL, max: MAX_TTL };

    /// Whether locks live by a session.
    pub fn is_per_session(self) -> bool {
        matches!(self, TtlSupport::PerSession { .. })
    }

    /// The ttl of a lock that asks for this one; `None` if it would get a shorter one.
    pub fn honoured(self, wanted: Duration) -> Option<Duration> {
        let (min, max) = match self {
            TtlSupport::PerLock { min, max } => (min, max),
            TtlSupport::PerSession { ttl } => (ttl, ttl),
        };
        (wanted <= max).then(|| wanted.max(min))
    }

    /// The supported ttl that is nearest to this one.
    pub fn nearest(self, wanted: Duration) -> Duration {
        match self {
            TtlSupport::PerLock { min, max } => wanted.clamp(min, max),
            TtlSupport::PerSession { ttl } => ttl,
        }
    }

    /// Why a ttl that is longer than supported is refused.
    pub(crate) fn refusal(self, backend: &str, wanted: Duration) -> String {
        let wanted = humantime::format_duration(wanted);
        match self {
            TtlSupport::PerLock { max, .. } => format!(
                "the ttl is {wanted}, but {backend}:// keeps a lock for {} at most; set a shorter ttl",
                humantime::format_duration(max)
            ),
            TtlSupport::PerSession { ttl } => format!(
                "the ttl is {wanted}, but all locks of a client live by its session with {backend}://, which lasts {}; raise the ttl of the client, or lower that of the lock",
                humantime::format_duration(ttl)
            ),
        }
    }
}

impl Capabilities {
    /// A backend that can do everything, reached through a network.
    pub const fn all(name: &'static str) -> Self {
        Capabilities {
            name,
            shared: true,
            permits: true,
            fifo: true,
            release_after: true,
            operators: true,
            waiters: true,
            remote: true,
            max_batch: 1,
            in_flight: IN_FLIGHT,
            ttl: TtlSupport::ANY,
            max_handovers: MAX_HANDOVERS,
            max_handover_time: MAX_HANDOVER_TIME,
        }
    }
}
