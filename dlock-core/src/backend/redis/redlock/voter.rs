//! What a client knows of a node, from meeting it with each connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::Value;

use super::super::connector::Connection;
use super::super::scripts::Run;
use super::super::{codec, errors};
use super::quorum::silence;
use super::scripts::QuorumScripts;
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Operation, Result};

/// The clock of a node that was never met.
const UNKNOWN: i64 = i64::MIN;

/// The nodes of one quorum by their run ids, so that none is counted twice.
#[derive(Default)]
pub(in super::super) struct KnownNodes(Mutex<Vec<(usize, String, String)>>);

impl KnownNodes {
    /// Remembers a node; the name of another node that is the same server.
    fn enter(&self, place: usize, run_id: &str, shown: &str) -> Option<String> {
        let mut known_nodes = self.0.lock();
        known_nodes.retain(|(known, ..)| *known != place);
        let twin = known_nodes.iter().find(|(_, known, _)| known == run_id).map(|it| it.2.clone());
        known_nodes.push((place, run_id.to_owned(), shown.to_owned()));
        twin
    }
}

/// A node, as it is met.
pub(in super::super) struct Voter {
    place: usize,
    known_nodes: Arc<KnownNodes>,
    marker: String,
    longest: Duration,
    /// Whether a node without a marker is new for sure, and may vote at once.
    new: bool,
    /// How many microseconds the node's clock is ahead of ours.
    offset: AtomicI64,
}

/// What a node says of itself.
pub(super) struct NodeHello {
    run_id: String,
    pub(super) clock: u64,
    since: u64,
    longest: Duration,
}

impl Voter {
    pub(super) fn new(
        place: usize,
        known_nodes: Arc<KnownNodes>,
        marker: String,
        longest: Duration,
        new: bool,
    ) -> Self {
        Voter { place, known_nodes, marker, longest, new, offset: AtomicI64::new(UNKNOWN) }
    }

    /// What a node is asked when it is met.
    pub(super) fn hello(&self) -> Run {
        let mut run = QuorumScripts::get().hello.on(1);
        run.arg(&self.marker).arg(codec::millis(self.longest)).arg(u8::from(self.new));
        run.arg(codec::micros(silence(self.longest)));
        run
    }

    /// Meets the node, before anything else is sent on a connection.
    pub(in super::super) async fn handshake(
        &self,
        connection: &Connection,
        shown: &str,
    ) -> Result<()> {
        let answer = connection.send(&self.hello().by_text()).await;
        let answer = answer.map_err(|error| errors::unanswered(Operation::Connect, &error))?;
        if let Value::ServerError(error) = &answer {
            return Err(errors::refused(Operation::Connect, error));
        }
        let hello =
            NodeHello::read(&answer).ok_or_else(|| errors::unreadable(Operation::Connect))?;
        if let Some(twin) = self.known_nodes.enter(self.place, &hello.run_id, shown) {
            return Err(fault(format!(
                "{shown} and {twin} are the same server, which would have two votes; name each node of the quorum once"
            )));
        }
        if hello.longest != self.longest {
            return Err(fault(format!(
                "the longest ttl is {} at {shown}, and {} here; set `max_ttl` to the same value in all programs (docs/redis.md says how to change it at the nodes)",
                humantime::format_duration(hello.longest),
                humantime::format_duration(self.longest)
            )));
        }
        self.shows(hello.clock);
        Ok(())
    }

    /// Learns what the node's clock shows now.
    pub(super) fn shows(&self, clock: u64) {
        let here = Clock::boot().now().as_micros();
        let offset = i64::try_from(clock).unwrap_or(0) - i64::try_from(here).unwrap_or(0);
        self.offset.store(offset, Ordering::Relaxed);
    }

    pub(super) fn offset(&self) -> Option<i64> {
        Some(self.offset.load(Ordering::Relaxed)).filter(|offset| *offset != UNKNOWN)
    }

    /// How long a node that says this of itself does not vote yet.
    pub(super) fn silent_for(&self, hello: &NodeHello) -> Option<Duration> {
        let votes_from = hello.since + codec::micros(silence(self.longest));
        let left = votes_from.saturating_sub(hello.clock);
        (left > 0).then(|| Duration::from_micros(left))
    }
}

impl NodeHello {
    pub(super) fn read(answer: &Value) -> Option<Self> {
        let words: Vec<String> = redis::from_redis_value_ref(answer).ok()?;
        let [run_id, clock, since, longest] = <[String; 4]>::try_from(words).ok()?;
        let longest = Duration::from_millis(longest.parse().ok()?);
        Some(NodeHello { run_id, clock: clock.parse().ok()?, since: since.parse().ok()?, longest })
    }
}

fn fault(what: String) -> Error {
    Error::new(ErrorKind::Config, Operation::Connect).with_message(what)
}
