//! The words that the client and a backend speak.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// 128 random bits, new for every acquisition.
///
/// Whoever shows it owns the claim: acquire is idempotent by it, renew and
/// release compare it on the server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner([u64; 2]);

impl Owner {
    /// The owner with these bits.
    pub fn from_bits(bits: u128) -> Self {
        Owner([(bits >> 64) as u64, bits as u64])
    }

    /// Its bits.
    pub fn bits(self) -> u128 {
        (u128::from(self.0[0]) << 64) | u128::from(self.0[1])
    }

    pub(crate) fn low_bits(self) -> u64 {
        self.0[1]
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.bits())
    }
}

impl fmt::Debug for Owner {
    /// Shows the first bits only: who knows an owner can release its lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:08x}..)", self.0[0] >> 32)
    }
}

/// A fencing token: a whole number below 2^53, strictly rising for a key.
///
/// Send it along with every write made under the lock and let the resource
/// refuse what is older than what it has seen: see [`Fence`](crate::Fence).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// The largest token; exact in JSON, JavaScript, Lua and BIGINT.
    pub const MAX: Token = Token((1 << 53) - 1);

    /// The token with this number, if it is below 2^53.
    pub fn new(number: u64) -> Option<Self> {
        (number <= Self::MAX.0).then_some(Token(number))
    }

    /// The number.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a claim wants of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Alone: a mutex, or the writing side of a read-write lock.
    Exclusive,
    /// Together with other readers.
    Shared,
    /// Some of a number of permits, in a key space of its own.
    Permits {
        /// How many.
        count: u32,
        /// Out of how many; each claim is checked against what it brings.
        of: u32,
    },
}

impl Mode {
    /// Whether this is a claim on a semaphore, whose keys are apart.
    pub fn is_permits(self) -> bool {
        matches!(self, Mode::Permits { .. })
    }
}

/// Who holds or waits: shown to operators and in time-out errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Number of the client inside its process; a backend routes notices by it.
    pub client: u64,
    /// The client's name.
    pub name: String,
    /// The machine.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// What `.tag(name, value)` said.
    pub tags: Vec<(String, String)>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {} on {})", self.name, self.pid, self.host)?;
        for (name, value) in &self.tags {
            write!(f, " {name}={value}")?;
        }
        Ok(())
    }
}

/// A request for a lock; granted, its lease.
#[derive(Clone, Debug)]
pub struct Claim {
    /// On what.
    pub key: Key,
    /// By whom. The same owner asking again gets the same grant, with a fresh ttl.
    pub owner: Owner,
    /// What for. Renewing an exclusive lease as shared downgrades it.
    pub mode: Mode,
    /// How long a grant lasts unless renewed.
    pub ttl: Duration,
    /// Whether to join the queue when busy.
    pub queue: bool,
    /// A lease of the same key that is given up in the same step, first.
    pub instead_of: Option<Owner>,
    /// How many tokens the grant should bring, one for each local hand-over.
    pub tokens: u32,
    /// Who asks.
    pub holder: Arc<Holder>,
    /// When it was sent, by the asker's clock. Says nothing to the backend, which
    /// keeps that of the latest asking in the queue and gives it back in
    /// [`Notice::Granted`].
    pub sent: Moment,
}

impl Claim {
    /// How long a place in the queue lasts unless asked for again, and how long
    /// a grant by hand-over lasts, from that asking, until it is confirmed: the
    /// ttl, but 3 s at most, so that the places of a dead process end soon.
    pub fn patience(&self) -> Duration {
        self.ttl.min(Duration::from_secs(3))
    }
}

/// The lock was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The first of its tokens; zero for permits, which have none.
    pub first: u64,
    /// How many tokens there are.
    pub count: u32,
}

/// The outcome of one try.
#[derive(Clone, Debug)]
pub enum AcquireOutcome {
    /// The lock was given.
    Granted(Grant),
    /// Somebody else has it, and the claim did not want to wait.
    Busy {
        /// Who, if the backend can tell.
        holder: Option<Arc<Holder>>,
    },
    /// Somebody else has it; the claim stands in the queue and a
    /// [`Notice`] will come.
    Queued {
        /// Who, if the backend can tell.
        holder: Option<Arc<Holder>>,
        /// When the lease in the way ends if it is not renewed.
        free_in: Option<Duration>,
    },
}

/// The outcome of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// It lasts a ttl more.
    Held {
        /// Whether somebody else wants the key.
        others_wait: bool,
    },
    /// The backend does not know this owner as a holder.
    Lost,
}

/// How a lease is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// At once.
    Now,
    /// The key stays taken for this long.
    After(Duration),
}

/// The outcome of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ReleaseOutcome {
    /// The lock was held until now.
    Released,
    /// The lock had been lost before; whoever holds it now was not touched.
    AlreadyLost,
}

/// What a backend tells a client unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A queued claim was given the lock.
    Granted {
        /// With these tokens.
        grant: Grant,
        /// When the asking was sent that the hand-over lasts from. A notice may
        /// be late, even later than the end of what it tells of.
        sent: Moment,
    },
    /// A queued claim may find the lock free now.
    TryAgain,
    /// A lease ended: broken by an operator, or its session expired.
    Lost(LossReason),
}

/// Why a lock that was held is no longer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// It could not be renewed before its deadline.
    Deadline,
    /// The backend no longer knew it: its data was lost, or it came too late.
    Forgotten,
    /// Somebody broke it.
    Broken {
        /// Who.
        by: String,
    },
    /// It was held for as long as `max_hold` allows.
    MaxHold,
    /// The client was shut down.
    Shutdown,
    /// The lock that it was nested in was given back.
    Released,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossReason::Deadline => f.write_str("it could not be renewed before its deadline"),
            LossReason::Forgotten => f.write_str("the backend no longer knew it"),
            LossReason::Broken { by } => write!(f, "it was broken by {by}"),
            LossReason::MaxHold => f.write_str("it was held for max_hold"),
            LossReason::Shutdown => f.write_str("the client was shut down"),
            LossReason::Released => f.write_str("the lock that it was nested in was given back"),
        }
    }
}

/// What a call asks.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "as in the trait Backend")]
pub enum Request {
    Acquire(Arc<Claim>),
    Renew(Arc<Claim>),
    Release(Arc<Claim>, Release),
}

/// What a call was answered.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "as in the trait Backend")]
pub enum Answer {
    Acquire(Result<AcquireOutcome>),
    Renew(Result<RenewOutcome>),
    Release(Result<ReleaseOutcome>),
}

impl Request {
    /// What is being done.
    pub fn operation(&self) -> Operation {
        match self {
            Request::Acquire(_) => Operation::Acquire,
            Request::Renew(_) => Operation::Renew,
            Request::Release(..) => Operation::Release,
        }
    }

    /// What it is about.
    pub fn claim(&self) -> &Claim {
        match self {
            Request::Acquire(claim) | Request::Renew(claim) | Request::Release(claim, _) => claim,
        }
    }

    /// The answer that it failed.
    pub fn failed(&self, error: Error) -> Answer {
        match self {
            Request::Acquire(_) => Answer::Acquire(Err(error)),
            Request::Renew(_) => Answer::Renew(Err(error)),
            Request::Release(..) => Answer::Release(Err(error)),
        }
    }

    /// The answer that there was none.
    pub(crate) fn unanswered(&self) -> Answer {
        let error = Error::new(ErrorKind::Unknown, self.operation());
        self.failed(error.saying("the backend did not answer in time"))
    }
}
