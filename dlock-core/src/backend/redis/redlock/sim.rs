//! A seeded simulation of clients and nodes, on virtual clocks and a virtual network.
//!
//! The clients are those of `quorum.rs`, the nodes are the model of the scripts. Messages
//! are lost, delayed, duplicated and overtake each other; nodes and clients pause and are
//! cut off from each other; nodes lose their data, all or what was written last; clocks are apart and run at different
//! rates, within the bound. Checked: by their own deadlines no two clients hold the lock at
//! the same time, and tokens rise strictly from holder to holder.

mod events;
mod faults;
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use self::events::{DriftingClock, Event, Queued};
use super::model::{Node, NodeBug};
use super::quorum::{NodeReply, NodeRequest, Outcome, QuorumSize, Round, silence};
use super::quorum_claim::QuorumClaim;
use crate::claim::{Claim, Grant, Holder, Mode, Owner};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation};
use crate::key::Key;

const TTL: Duration = Duration::from_millis(1_000);
/// How long a client waits for the answers of a round, at most.
const TIMEOUT: u64 = 950_000;
/// How long a run lasts, in microseconds.
const RUN: u64 = 30_000_000;
/// What the clocks of the nodes show at the start.
const EPOCH: u64 = 1_800_000_000_000_000;

/// What is wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    HalfIsEnough,
    CountedFromReply,
    CountsAnswers,
    Node(NodeBug),
}

struct SimNode {
    node: Node,
    /// What a restart brings back.
    saved: Node,
    clock: DriftingClock,
    paused_until: u64,
    boot: u32,
}

struct Client {
    clock: DriftingClock,
    claim: QuorumClaim,
    request: Claim,
    /// How far the nodes' clocks are ahead of its own.
    offset: u64,
    rounds: Vec<(u64, Round)>,
    attempts: u64,
    phase: u64,
    paused_until: u64,
    /// Until when it cannot reach each node.
    cut_off: Vec<u64>,
    held: Option<Held>,
}

struct Held {
    from: u64,
    deadline: Moment,
    tokens: Grant,
    until: u64,
}

struct Simulation {
    random: StdRng,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<Queued>>,
    nodes: Vec<SimNode>,
    clients: Vec<Client>,
    quorum: QuorumSize,
    next_round: u64,
    calm: bool,
    /// The last token of the last grant.
    last_token: u64,
    grants: u64,
    restored: u64,
    violations: Vec<String>,
}

fn claim(random: &mut StdRng) -> Claim {
    let holder = Holder { client: 0, name: "s".into(), host: "s".into(), pid: 1, tags: vec![] };
    Claim {
        key: Key::new("k").unwrap(),
        owner: Owner::from_bits(random.random()),
        mode: Mode::Exclusive,
        ttl: TTL,
        queue: true,
        instead_of: None,
        tokens: 8,
        holder: Arc::new(holder),
        sent: Moment::default(),
    }
}

impl Simulation {
    fn new(seed: u64, planted: Planted) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let count = if random.random_bool(0.3) { 3 } else { 5 };
        let mut quorum = QuorumSize::of(count);
        let node_bug = match planted {
            Planted::HalfIsEnough => {
                quorum.majority = count / 2;
                None
            }
            Planted::CountedFromReply => {
                quorum.counted_from_reply = true;
                None
            }
            Planted::CountsAnswers => {
                quorum.counts_answers = true;
                None
            }
            Planted::Node(bug) => Some(bug),
            Planted::Nothing => None,
        };
        let nodes = (0..count).map(|_| {
            let clock = DriftingClock::new(&mut random, EPOCH);
            // They are new for sure, so they vote at once.
            let since = clock.at(0) - 60_000_000;
            let node = Node::new(since, silence(TTL), node_bug);
            SimNode { saved: node.clone(), node, clock, paused_until: 0, boot: 0 }
        });
        let nodes = nodes.collect();
        let clients = (0..random.random_range(2..5)).map(|_| {
            let request = claim(&mut random);
            Client {
                clock: DriftingClock::new(&mut random, 0),
                claim: QuorumClaim::new(quorum, request.owner, 0),
                request,
                offset: EPOCH,
                rounds: Vec::new(),
                attempts: 0,
                phase: 0,
                paused_until: 0,
                cut_off: vec![0; count],
                held: None,
            }
        });
        let clients = clients.collect();
        let mut simulation = Simulation {
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            nodes,
            clients,
            quorum,
            next_round: 0,
            calm: false,
            last_token: 0,
            grants: 0,
            restored: 0,
            violations: Vec::new(),
            random,
        };
        for client in 0..simulation.clients.len() {
            simulation.act_in(client, 1_000);
        }
        simulation.at(50_000, Event::Fault);
        simulation
    }

    fn at(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Queued { at, order: self.order, event }));
    }

    /// How long a message is on its way.
    fn delay(&mut self) -> u64 {
        if self.calm || self.random.random_bool(0.9) {
            self.random.random_range(100..3_000)
        } else {
            self.random.random_range(3_000..2_500_000)
        }
    }

    fn is_lost(&mut self) -> bool {
        !self.calm && self.random.random_bool(0.03)
    }

    fn local(&self, client: usize) -> Moment {
        Moment::from_nanos(self.clients[client].clock.at(self.now) * 1_000)
    }

    /// The client does something after about this time, unless something else comes first.
    fn act_in(&mut self, client: usize, about: u64) {
        self.clients[client].phase += 1;
        let phase = self.clients[client].phase;
        let at = self.now + self.random.random_range(about / 2..=about);
        self.at(at, Event::Acts { client, phase });
    }

    fn send_round(&mut self, client: usize, round: Round) {
        let number = self.next_round;
        self.next_round += 1;
        let ask = round.ask;
        self.clients[client].rounds.push((number, round));
        for node in 0..self.nodes.len() {
            self.send(client, node, number, ask);
        }
        let timeout = self.random.random_range(TIMEOUT / 4..TIMEOUT);
        self.at(self.now + timeout, Event::TimesOut { client, round: number });
    }

    fn send(&mut self, client: usize, node: usize, round: u64, ask: NodeRequest) {
        let boot = self.nodes[node].boot;
        let copies = if !self.calm && self.random.random_bool(0.02) { 2 } else { 1 };
        for _ in 0..copies {
            let cut_off = self.clients[client].cut_off[node] > self.now;
            if !cut_off && !self.is_lost() {
                let at = self.now + self.delay();
                self.at(at, Event::Arrives { client, node, boot, round, ask });
            }
        }
    }

    fn run(&mut self) {
        while let Some(Reverse(Queued { at, event, .. })) = self.queue.pop() {
            self.now = at;
            if at > RUN || !self.violations.is_empty() {
                return;
            }
            self.calm = at > RUN - 6_000_000;
            match event {
                Event::Arrives { client, node, boot, round, ask } => {
                    self.arrives(client, node, boot, round, ask);
                }
                Event::Answers { client, node, round, reply } => {
                    if self.now < self.clients[client].paused_until {
                        let at = self.clients[client].paused_until;
                        self.at(at, Event::Answers { client, node, round, reply });
                    } else {
                        self.answers(client, node, round, reply);
                    }
                }
                Event::TimesOut { client, round } => {
                    if self.now < self.clients[client].paused_until {
                        let at = self.clients[client].paused_until;
                        self.at(at, Event::TimesOut { client, round });
                    } else {
                        self.times_out(client, round);
                    }
                }
                Event::Acts { client, phase } => {
                    if self.now < self.clients[client].paused_until {
                        let at = self.clients[client].paused_until;
                        self.at(at, Event::Acts { client, phase });
                    } else if self.clients[client].phase == phase {
                        self.acts(client);
                    }
                }
                Event::Fault => self.fault(),
            }
        }
    }

    fn arrives(&mut self, client: usize, node: usize, boot: u32, round: u64, ask: NodeRequest) {
        let here = &mut self.nodes[node];
        if boot != here.boot {
            return; // its connection is gone
        }
        if self.now < here.paused_until {
            let at = here.paused_until;
            return self.at(at, Event::Arrives { client, node, boot, round, ask });
        }
        let clock = here.clock.at(self.now);
        let had = here.node.holder(clock);
        let reply = here.node.ask(clock, &ask, u64::try_from(TTL.as_micros()).unwrap());
        if matches!(ask, NodeRequest::Renew { .. })
            && had.is_none()
            && matches!(reply, NodeReply::Accepted { .. })
        {
            self.restored += 1;
        }
        if !self.is_lost() {
            let at = self.now + self.delay();
            self.at(at, Event::Answers { client, node, round, reply });
        }
    }

    fn answers(&mut self, client: usize, node: usize, number: u64, reply: NodeReply) {
        let now = self.local(client);
        let it = &mut self.clients[client];
        let Some((_, round)) = it.rounds.iter_mut().find(|(known, _)| *known == number) else {
            return;
        };
        if let NodeReply::TokenTooHigh | NodeReply::TokenTooLow { .. } = reply {
            let clock = self.nodes[node].clock.at(self.now);
            it.offset = clock - it.clock.at(self.now);
        }
        it.claim.learn(round, node, &reply);
        let mut outcome = round.on_reply(now, node, reply);
        if outcome.is_none() && self.random.random_bool(0.2) {
            outcome = round.decide_divided();
        }
        let Some(outcome) = outcome else { return };
        let outcome = it.claim.settle(round, outcome);
        self.decided(client, number, outcome);
    }

    fn times_out(&mut self, client: usize, number: u64) {
        let silent = || {
            NodeReply::NoReply(
                Error::new(ErrorKind::Unknown, Operation::Acquire).with_message("no answer"),
            )
        };
        for node in 0..self.nodes.len() {
            let it = &mut self.clients[client];
            let open =
                it.rounds.iter().any(|(known, round)| *known == number && round.awaits(node));
            if open {
                self.answers(client, node, number, silent());
            }
        }
        self.clients[client].rounds.retain(|(known, _)| *known != number);
    }

    fn decided(&mut self, client: usize, number: u64, outcome: Outcome) {
        let now = self.local(client);
        let it = &mut self.clients[client];
        let place = it.rounds.iter().position(|(known, _)| *known == number).unwrap();
        let round = &it.rounds[place].1;
        let (attempt_id, ask, valid) = (round.attempt_id(), round.ask, round.valid_until(now));
        match (ask, outcome) {
            (NodeRequest::Acquire { .. }, Outcome::Granted(tokens)) => {
                it.held = Some(Held { from: self.now, deadline: valid, tokens, until: u64::MAX });
                self.granted(client, tokens);
                self.plan(client);
            }
            (NodeRequest::Acquire { .. }, Outcome::Again) => self.acquire(client),
            (NodeRequest::Acquire { .. }, outcome) => {
                let voted: Vec<usize> = round.may_have_voted().collect();
                for node in voted {
                    self.send(client, node, u64::MAX, NodeRequest::Undo { attempt_id });
                }
                let pause = match outcome {
                    Outcome::Split { .. } => 20_000,
                    _ => 200_000,
                };
                self.act_in(client, pause);
            }
            (NodeRequest::Renew { .. }, outcome) => {
                let Some(held) = &mut it.held else { return };
                if now >= held.deadline {
                    return self.lost(client);
                }
                match outcome {
                    Outcome::Held { .. } => {
                        held.deadline = held.deadline.max(valid);
                        self.plan(client);
                    }
                    Outcome::Extended(tokens) => {
                        held.deadline = held.deadline.max(valid);
                        held.tokens = tokens;
                        self.granted(client, tokens);
                        self.plan(client);
                    }
                    Outcome::Lost => self.lost(client),
                    _ => self.act_in(client, 80_000),
                }
            }
            (NodeRequest::Release { .. }, _) => {
                let request = claim(&mut self.random);
                let it = &mut self.clients[client];
                let next = it.claim.tokens_end();
                it.claim = QuorumClaim::new(
                    self.quorum,
                    request.owner,
                    if self.random.random_bool(0.5) { next } else { 0 },
                );
                it.request = request;
                let pause = self.random.random_range(1_000..300_000);
                self.act_in(client, pause);
            }
            (NodeRequest::Undo { .. }, _) => {}
        }
    }

    /// Checks that nobody else holds it, and that tokens rise.
    fn granted(&mut self, client: usize, tokens: Grant) {
        self.grants += 1;
        for (other, it) in self.clients.iter().enumerate() {
            if let Some(held) = &it.held
                && other != client
                && self.now < it.clock.when(held.deadline.as_nanos() / 1_000)
            {
                self.violations.push(format!(
                    "at {} client {client} is granted what client {other} holds since {}",
                    self.now, held.from
                ));
            }
        }
        if tokens.first <= self.last_token {
            self.violations.push(format!(
                "at {} client {client} gets token {} after {}",
                self.now, tokens.first, self.last_token
            ));
        }
        self.last_token = tokens.first + u64::from(tokens.count) - 1;
    }

    /// A holder renews, or has held it for long enough.
    fn plan(&mut self, client: usize) {
        let first = self.clients[client].held.as_ref().is_some_and(|held| held.until == u64::MAX);
        if first {
            let long = if self.random.random_bool(0.2) { 4_000_000 } else { 50_000 };
            let until = self.now + self.random.random_range(1_000..long);
            if let Some(held) = &mut self.clients[client].held {
                held.until = until;
            }
        }
        let until = self.clients[client].held.as_ref().map_or(0, |held| held.until);
        let about = until.saturating_sub(self.now).clamp(1_000, 300_000);
        self.act_in(client, about);
    }

    fn lost(&mut self, client: usize) {
        self.release(client);
    }

    fn release(&mut self, client: usize) {
        let now = self.local(client);
        let it = &mut self.clients[client];
        it.held = None;
        let round = it.claim.release(now, TTL);
        self.send_round(client, round);
        // Rounds that are under way no longer matter.
        let it = &mut self.clients[client];
        let last = it.rounds.pop();
        it.rounds.clear();
        it.rounds.extend(last);
        it.phase += 1;
    }

    fn acquire(&mut self, client: usize) {
        let now = self.local(client);
        let it = &mut self.clients[client];
        let clock = it.clock.at(self.now) + it.offset;
        it.attempts += 1;
        let round = it.claim.acquire(now, clock, it.attempts, &it.request);
        it.phase += 1;
        self.send_round(client, round);
    }

    fn acts(&mut self, client: usize) {
        let now = self.local(client);
        let it = &mut self.clients[client];
        let Some(held) = &it.held else { return self.acquire(client) };
        if now >= held.deadline {
            return self.lost(client);
        }
        if self.now >= held.until {
            return self.release(client);
        }
        let further = if self.random.random_bool(0.3) { 8 } else { 0 };
        let request = Claim { tokens: further, ..it.request.clone() };
        let clock = it.clock.at(self.now) + it.offset;
        if let Some(round) = it.claim.renew(now, clock, &request) {
            it.phase += 1;
            self.send_round(client, round);
        }
    }
}
