//! The model of a node and the script on a real server: they answer the same.

use std::time::Duration;

use dlock_testkit::redis::RedisServer;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use redis::Value;

use super::super::codec as names;
use super::codec;
use super::model::Node;
use super::quorum::{AttemptId, NodeReply, NodeRequest, silence};
use super::scripts::QuorumScripts;
use crate::claim::{Claim, Grant, Holder, Mode, Owner};
use crate::clock::Moment;
use crate::error::Operation;
use crate::key::Key;

/// The longest ttl: so short that the node votes again before the test is over.
const LONGEST: Duration = Duration::from_millis(200);
/// Longer than any lease.
const LONGEST_LEASE: Duration = Duration::from_millis(25);
const ROUNDS: usize = 3_000;

struct Server {
    connection: redis::Connection,
    claim: Claim,
}

impl Server {
    fn new(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let holder = Holder { client: 0, name: "a".into(), host: "a".into(), pid: 1, tags: vec![] };
        let claim = Claim {
            key: Key::new("k").unwrap(),
            owner: Owner::from_bits(0),
            mode: Mode::Exclusive,
            ttl: LONGEST,
            queue: false,
            instead_of: None,
            tokens: 1,
            holder: holder.into(),
            sent: Moment::default(),
        };
        Server { connection: client.get_connection().unwrap(), claim }
    }

    fn clock(&mut self) -> u64 {
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut self.connection).unwrap();
        seconds * 1_000_000 + micros
    }

    /// Makes the node one that remembers since `silence` before now, or since now.
    fn mark(&mut self, votes: bool) {
        let mut run = QuorumScripts::get().hello.on(1);
        run.arg("dlock:2:{t}:v").arg(names::millis(LONGEST)).arg(u8::from(votes));
        run.arg(names::micros(silence(LONGEST)));
        let _: Vec<String> = run.by_text().query(&mut self.connection).unwrap();
    }

    fn flush(&mut self) {
        let _: String = redis::cmd("FLUSHALL").query(&mut self.connection).unwrap();
    }

    /// Asks about the key `k`; with `beside` the same about another key first, so that what
    /// the two have in common is written once.
    fn ask(&mut self, ask: &NodeRequest, ttl: Duration, beside: bool) -> NodeReply {
        let keys = if beside { &["beside", "k"][..] } else { &["k"] };
        let mut run = QuorumScripts::get().calls.on(1 + keys.len());
        run.arg("dlock:2:{t}:v");
        for key in keys {
            run.arg(format!("dlock:2:{{t:{key}}}:q"));
        }
        self.claim.ttl = ttl;
        let calls = keys.iter().map(|_| (ask, &self.claim));
        codec::write(&mut run, calls, LONGEST, |_| "{}".into(), "dlock:2:n:0");
        let answer: Value = run.by_text().query(&mut self.connection).unwrap();
        let operations = keys.iter().map(|_| Operation::Acquire);
        let mut answers = codec::read_all(&answer, operations).expect("an answer for each call");
        answers.pop().expect("the last one is for `k`").0
    }
}

/// What is compared: not how long, and which token, which depend on the very microsecond.
fn shown(reply: &NodeReply) -> String {
    match reply {
        NodeReply::HeldByOther { by, .. } => format!("taken by {by:?}"),
        NodeReply::TokenTooLow { .. } => "low".to_owned(),
        NodeReply::NotVoting { .. } => "not voting".to_owned(),
        other => format!("{other:?}"),
    }
}

fn any_ask(random: &mut StdRng, clock: u64, next_attempt: &mut u64) -> NodeRequest {
    let owner = Owner::from_bits(random.random_range(1..4));
    *next_attempt += 1;
    let back = random.random_range(0..3).min(*next_attempt - 1);
    let attempt_id = AttemptId { owner, attempt: *next_attempt - back };
    let first = match random.random_range(0..10) {
        0 => clock - 2_500_000,
        1 => clock + 2_500_000,
        2 => clock - random.random_range(0..300_000),
        _ => clock,
    };
    let tokens = Grant { first, count: random.random_range(1..5) };
    match random.random_range(0..10) {
        0..5 => {
            let other =
                random.random_bool(0.2).then(|| Owner::from_bits(random.random_range(1..4)));
            NodeRequest::Acquire { attempt_id, tokens, instead_of: other.filter(|it| *it != owner) }
        }
        5..8 => {
            let further = random.random_bool(0.5).then_some(Grant { first: first + 10, count: 3 });
            NodeRequest::Renew { attempt_id, tokens, further, restore: random.random_bool(0.5) }
        }
        8 => NodeRequest::Undo { attempt_id },
        _ => NodeRequest::Release { attempt_id },
    }
}

#[test]
fn script_and_model_agree() {
    let Some(server) = RedisServer::start() else { return };
    let mut server = Server::new(&server);
    let mut random = StdRng::seed_from_u64(7);
    let clock = server.clock();
    server.mark(true);
    let since = clock - names::micros(silence(LONGEST));
    let mut model = Node::new(since, silence(LONGEST), None);
    let (mut attempt, mut unsure, mut last) = (0, 0, None);
    let mut kinds = std::collections::BTreeMap::<String, usize>::new();
    for round in 0..ROUNDS {
        if round == ROUNDS / 2 {
            server.flush();
            server.mark(false);
            let clock = server.clock();
            model.loses_data(clock, None);
        }
        if round == ROUNDS * 2 / 3 {
            std::thread::sleep(silence(LONGEST)); // it votes again
        }
        let mut before = server.clock();
        while model.ends_about(before) {
            std::thread::sleep(Duration::from_millis(1)); // its end is known to some microseconds
            before = server.clock();
        }
        // Sometimes the same request again, or a renewal of what was granted.
        let ask = match last {
            Some(ask) if random.random_bool(0.3) => ask,
            _ => any_ask(&mut random, before, &mut attempt),
        };
        let ask = match (last, ask) {
            (
                Some(NodeRequest::Acquire { attempt_id, tokens, .. }),
                NodeRequest::Renew { further, restore, .. },
            ) if random.random_bool(0.7) => {
                NodeRequest::Renew { attempt_id, tokens, further, restore }
            }
            (_, ask) => ask,
        };
        last = Some(ask);
        let ttl = Duration::from_millis(random.random_range(1..20)); // below LONGEST_LEASE
        let reply = server.ask(&ask, ttl, random.random_bool(0.5));
        let after = server.clock();
        let micros = names::micros(ttl);
        let (mut early, mut late) = (model.clone(), model.clone());
        let first = shown(&early.ask(before, &ask, micros));
        let second = shown(&late.ask(after, &ask, micros));
        if first == second {
            assert_eq!(shown(&reply), first, "round {round}: {ask:?}");
            *kinds.entry(first.split(' ').next().unwrap_or("").to_owned()).or_default() += 1;
            model = late;
        } else {
            // It happened at a moment in between: what the server has now is not known.
            unsure += 1;
            model = if shown(&reply) == first { early } else { late };
        }
        if after - before > 2_000 {
            // On a busy machine the end of a lease is not known well enough: it is waited for.
            std::thread::sleep(Duration::from_micros(after - before) + LONGEST_LEASE);
        }
        if random.random_bool(0.1) {
            std::thread::sleep(Duration::from_millis(random.random_range(1..25)));
        }
    }
    println!("{kinds:?}, {unsure} unsure");
    assert!(unsure < ROUNDS / 5, "{unsure}");
    for kind in ["Accepted", "taken", "low", "TokenTooHigh", "NoLease", "not"] {
        assert!(kinds.get(kind).is_some_and(|count| *count > 20), "{kind}: {kinds:?}");
    }
}
