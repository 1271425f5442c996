//! The types that the client and a backend exchange: claims, grants, tokens, notices.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// The owner of a claim: 128 random bits, new for every acquisition.
///
/// A backend grants the same owner the same claim again, and renews or releases only
/// the claim of the owner that asks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner([u64; 2]);

impl Owner {
    /// The owner with these bits.
    pub const fn from_bits(bits: u128) -> Self {
        Owner([(bits >> 64) as u64, bits as u64])
    }

    /// The bits of this owner.
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
    /// Shows only the first bits, because whoever knows an owner can release its lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:08x}..)", self.0[0] >> 32)
    }
}

/// A fencing token: a whole number below 2^53 that rises with every holder of a key.
///
/// Send it with every write that is made under the lock, and let the resource reject
/// a write with a lower token than it has seen: see [`Fence`](crate::Fence).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// The largest token. It is exact in JSON, JavaScript, Lua and BIGINT.
    pub const MAX: Token = Token((1 << 53) - 1);

    /// The token with this number, if it is below 2^53.
    pub fn new(number: u64) -> Option<Self> {
        (number <= Self::MAX.0).then_some(Token(number))
    }

    /// The token as a number.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a key is held: exclusive, shared, or as permits of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Exclusive: a mutex, or the write side of a read-write lock.
    Exclusive,
    /// Shared with other readers: the read side of a read-write lock.
    Shared,
    /// Some permits of a semaphore. Keys of semaphores are separate from those of locks.
    Permits {
        /// The number of permits that are requested or held.
        count: u32,
        /// The capacity of the semaphore. Each claim is checked against the capacity
        /// that it brings.
        of: u32,
    },
}

impl Mode {
    /// Whether this is a claim on permits of a semaphore.
    pub fn is_permits(self) -> bool {
        matches!(self, Mode::Permits { .. })
    }
}

/// Who holds a key or waits for it, as operators and errors show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The number of the client inside its process; a backend routes notices by it.
    pub client: u64,
    /// The name of the client.
    pub name: String,
    /// The host name of the machine.
    pub host: String,
    /// The process id; zero if it is not known.
    pub pid: u32,
    /// The tags that `.tag(name, value)` added.
    pub tags: Vec<(String, String)>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, host) = (Printable(&self.name), Printable(&self.host));
        match (self.pid, self.host.as_str()) {
            (0, "") => write!(f, "{name}")?,
            (0, _) => write!(f, "{name} (on {host})")?,
            (pid, _) => write!(f, "{name} (pid {pid} on {host})")?,
        }
        for (name, value) in &self.tags {
            write!(f, " {}={}", Printable(name), Printable(value))?;
        }
        Ok(())
    }
}

/// A string of the store without what a terminal would obey. Clients of dlock write no control
/// characters, but others may write to the store too.
pub(crate) struct Printable<'a>(pub(crate) &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.split(char::is_control).enumerate().try_for_each(|(index, part)| {
            if index > 0 {
                f.write_str("\u{fffd}")?;
            }
            f.write_str(part)
        })
    }
}

/// The longest time that a place in the queue lasts.
const MAX_PATIENCE: Duration = Duration::from_secs(3);

/// A request for a lock at the backend and, once it is granted, its lease.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The key that the claim is on.
    pub key: Key,
    /// The owner of the claim. The same owner gets the same grant again, with a new ttl.
    pub owner: Owner,
    /// How the key is held. Renewing an exclusive lease as shared downgrades it.
    pub mode: Mode,
    /// How long a grant lasts if it is not renewed.
    pub ttl: Duration,
    /// Whether the claim joins the queue if the key is busy.
    pub queue: bool,
    /// The owner of a lease of the same key that is released first, in the same step.
    pub instead_of: Option<Owner>,
    /// The number of tokens that the grant should bring, one for each local hand-over.
    /// In a renewal: the number of further tokens, zero for none.
    pub tokens: u32,
    /// The client that requests the lock.
    pub holder: Arc<Holder>,
    /// The moment when the claim was sent, by the clock of its sender. A backend does
    /// not interpret it: it keeps the moment of the latest request in the queue and
    /// returns it in [`Notice::Granted`].
    pub sent: Moment,
}

impl Claim {
    /// How long a place in the queue lasts if it is not requested again, and how long
    /// a grant from the queue lasts, from that request on, until it is confirmed: the
    /// ttl, but at most 3 s, so that the places of a dead process expire soon.
    pub fn queue_ttl(&self) -> Duration {
        self.ttl.min(MAX_PATIENCE)
    }
}

/// The tokens that came with a granted lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The first token of the grant; zero for permits, which have none.
    pub first: u64,
    /// The number of tokens in the grant.
    pub count: u32,
}

/// How long the locks of a session are certain to be held. Backends whose locks belong to a
/// session return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionTerm {
    /// The moment when the session's last answered keep-alive was sent, by the clock of the
    /// client ([`Moment::now`]). Never the moment of its answer, and never that of another
    /// call.
    pub as_of: Moment,
    /// How long after that moment the store certainly keeps the session.
    pub term: Duration,
}

/// The outcome of a [`Request::Acquire`].
#[derive(Clone, Debug)]
pub enum AcquireOutcome {
    /// The lock was granted, for its ttl from the sending of the request on.
    Granted(Grant),
    /// The lock was granted, for as long as the session lives.
    SessionGranted {
        /// The tokens of the grant.
        grant: Grant,
        /// How long the session is certain to live.
        term: SessionTerm,
    },
    /// Somebody else holds the key; the claim is in the queue for as long as the session
    /// lives, and a [`Notice`] will come. It is not asked again every second.
    SessionQueued {
        /// The holder, if the backend knows it.
        holder: Option<Arc<Holder>>,
    },
    /// Somebody else holds the key, and the claim did not want to queue.
    Busy {
        /// The holder, if the backend knows it.
        holder: Option<Arc<Holder>>,
    },
    /// Somebody else holds the key; the claim is in the queue, and a [`Notice`] will
    /// come.
    Queued {
        /// The holder, if the backend knows it.
        holder: Option<Arc<Holder>>,
        /// The time until the lease of the holder expires if it is not renewed.
        free_in: Option<Duration>,
    },
}

impl AcquireOutcome {
    /// The tokens, if the lock was granted.
    pub fn grant(&self) -> Option<Grant> {
        match self {
            AcquireOutcome::Granted(grant) | AcquireOutcome::SessionGranted { grant, .. } => {
                Some(*grant)
            }
            _ => None,
        }
    }

    /// Whether the claim is in the queue.
    pub fn is_queued(&self) -> bool {
        matches!(self, AcquireOutcome::Queued { .. } | AcquireOutcome::SessionQueued { .. })
    }
}

/// The outcome of renewing one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// The lease was renewed by its ttl.
    Held {
        /// Whether somebody else waits for the key.
        others_wait: bool,
    },
    /// The session holds the lock.
    SessionHeld {
        /// Whether somebody else waits for the key.
        others_wait: bool,
        /// How long the session is certain to live.
        term: SessionTerm,
    },
    /// The lease was renewed by its ttl, nobody else waits for the key, and the holder
    /// has these tokens instead of those that are left. A backend may answer so if the
    /// lease is exclusive and the renewal asks for tokens.
    Extended(Grant),
    /// The backend does not know this owner as a holder.
    Lost,
}

impl RenewOutcome {
    /// Whether somebody else waits for the key; `None` if the lease is lost.
    pub fn others_wait(self) -> Option<bool> {
        match self {
            RenewOutcome::Held { others_wait } | RenewOutcome::SessionHeld { others_wait, .. } => {
                Some(others_wait)
            }
            RenewOutcome::Extended(_) => Some(false),
            RenewOutcome::Lost => None,
        }
    }
}

/// When the key of a released lease is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The key is free at once.
    Now,
    /// The key stays taken for this long after the release.
    After(Duration),
}

/// The outcome of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ReleaseOutcome {
    /// The lock was held until now, and is released.
    Released,
    /// The lock had been lost before. A new holder, if there is one, still holds it.
    AlreadyLost,
}

/// A message that a backend sends to a client without a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A queued claim was granted.
    Granted {
        /// The tokens of the grant.
        grant: Grant,
        /// The moment when the latest request of the claim was sent. The grant lasts
        /// from then on, so a notice that is late may tell of an expired grant.
        sent: Moment,
    },
    /// The lock may be free now, so a queued claim should be requested again.
    TryAgain,
    /// A lease was lost: it was broken by an operator, or its session expired.
    Lost(LossReason),
}

/// The reason why a held lock was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The lock could not be renewed before its deadline.
    Deadline,
    /// The backend no longer knew the lock: the backend lost its data, or the renewal
    /// came too late.
    Forgotten,
    /// An operator broke the lock.
    Broken {
        /// The client that broke the lock.
        by: String,
    },
    /// The lock was held for as long as `max_hold` allows.
    MaxHold,
    /// The session of the client with the store ended, and all its locks with it.
    SessionLost,
    /// The client was shut down.
    Shutdown,
    /// The outer lock that this lock was nested in was released.
    Released,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossReason::Deadline => f.write_str("it could not be renewed before its deadline"),
            LossReason::Forgotten => f.write_str("the backend no longer knew it"),
            LossReason::Broken { by } => write!(f, "it was broken by {}", Printable(by)),
            LossReason::MaxHold => {
                f.write_str("it was held for the longest time that max_hold allows")
            }
            LossReason::SessionLost => {
                f.write_str("the session with the store ended, and all its locks with it")
            }
            LossReason::Shutdown => f.write_str("the client was shut down"),
            LossReason::Released => f.write_str("the lock that it was nested in was released"),
        }
    }
}

/// A request to a backend, one of several that share a round trip.
#[derive(Clone, Debug)]
pub enum Request {
    /// Take the lock if it is free, else join the queue if the claim says so. The same
    /// owner gets the same grant again, with a new ttl; if it is in the queue, its place is
    /// prolonged by the claim's [queue ttl](Claim::queue_ttl).
    Acquire(Arc<Claim>),
    /// Prolong a lease by its ttl.
    Renew(Arc<Claim>),
    /// Give back what the owner has: a lease, or a place in the queue.
    Release(Arc<Claim>, Release),
}

/// The answer to a [`Request`].
#[derive(Clone, Debug)]
pub enum Answer {
    /// The answer to [`Request::Acquire`].
    Acquire(Result<AcquireOutcome>),
    /// The answer to [`Request::Renew`].
    Renew(Result<RenewOutcome>),
    /// The answer to [`Request::Release`].
    Release(Result<ReleaseOutcome>),
}

impl Request {
    /// The operation that is requested.
    pub fn operation(&self) -> Operation {
        match self {
            Request::Acquire(_) => Operation::Acquire,
            Request::Renew(_) => Operation::Renew,
            Request::Release(..) => Operation::Release,
        }
    }

    /// The claim that the request is about.
    pub fn claim(&self) -> &Arc<Claim> {
        match self {
            Request::Acquire(claim) | Request::Renew(claim) | Request::Release(claim, _) => claim,
        }
    }

    /// The answer that the request failed with this error.
    pub fn failed(&self, error: Error) -> Answer {
        match self {
            Request::Acquire(_) => Answer::Acquire(Err(error)),
            Request::Renew(_) => Answer::Renew(Err(error)),
            Request::Release(..) => Answer::Release(Err(error)),
        }
    }

    /// The answer when the backend gave none.
    pub(crate) fn unanswered(&self) -> Answer {
        let error = Error::new(ErrorKind::Unknown, self.operation());
        self.failed(error.with_message(
            "the backend did not answer in time; the change may or may not have been made",
        ))
    }
}
