//! The world that a seed plays in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use dlock::backend::memory::lock_table::LockTable;
use dlock::backend::{Answer, Request};
use dlock::backend::{Moment, Notice, Owner};
use dlock::machine::{Action, Actions, CallId, Engine, Limits, Ticket};
use dlock::machine::{Bug, HandoverLimits, PlantedBug};
use dlock::{ErrorKind, Key, Mode};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::checker::Checker;
use super::plan::{Fault, Plan};
use super::{Options, Report};

mod judge;
mod network;
mod tasks;

use self::network::failed;

/// Who sits where: a task of a process, in one of its lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seat {
    pub(super) process: usize,
    pub(super) life: u32,
    pub(super) task: usize,
    pub(super) round: u32,
}

/// The server's time when the simulation starts, in microseconds.
const EPOCH_MICROS: u64 = 1_700_000_000_000_000;
/// How often the checker looks for stalls once faults are over.
const LOOK: Duration = Duration::from_millis(250);
/// How long a free lock may be waited for: a lost message costs about a second,
/// a call its time-out.
const STALL: Duration = Duration::from_millis(2_500);
/// How long a task holds once faults are over, at most.
const CALM_HOLD: Duration = Duration::from_millis(10);
/// How long anybody may wait then: for 32 tasks, in the order of four processes.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

pub(super) struct World {
    plan: Plan,
    random: StdRng,
    now: Duration,
    seq: u64,
    events: BinaryHeap<Reverse<(Duration, u64, Pending)>>,
    happenings: BTreeMap<u64, Event>,
    processes: Vec<Process>,
    servers: Vec<Server>,
    keys: Vec<Key>,
    checker: Checker,
    /// Since when a key has been free at every look.
    free_since: Vec<Option<Duration>>,
    planted: PlantedBug,
    plant: Option<Bug>,
    clients: u64,
    /// When a message was last lost or late, or a fault ended.
    troubled: Duration,
    faults_on: u32,
    wants_log: bool,
    report: Report,
}

/// Orders nothing: events are ordered by time and number.
type Pending = ();

struct Process {
    life: u32,
    client: u64,
    alive: bool,
    paused: bool,
    clock: Drifting,
    /// One machine for each server.
    machines: Vec<Engine<usize>>,
    ticks: Vec<Duration>,
    unanswered: Vec<BTreeMap<CallId, Request>>,
    tasks: Vec<Task>,
    /// What happened while it was paused.
    missed: VecDeque<Event>,
}

#[derive(Clone, Copy)]
struct Drifting {
    per_mille: i64,
    offset: Duration,
}

impl Drifting {
    fn at(self, now: Duration) -> Moment {
        let nanos = i128::try_from(now.as_nanos()).unwrap_or(0);
        let local = nanos + nanos * i128::from(self.per_mille) / 1_000;
        Moment::from_nanos(u64::try_from(local).unwrap_or(0)) + self.offset
    }

    /// When the clock shows this, at the earliest.
    fn when(self, shows: Moment) -> Duration {
        let local = i128::from((shows - self.offset).as_nanos());
        let nanos = local * 1_000 / i128::from(1_000 + self.per_mille) + 1;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

struct Server {
    queue: LockTable,
    clock: Drifting,
    down: bool,
    stopped: bool,
    inbox: VecDeque<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Thinking,
    Waiting,
    Holding,
    Releasing,
}

#[derive(Clone, Debug)]
struct Task {
    doing: Doing,
    round: u32,
    ticket: Option<Ticket>,
    key: usize,
    mode: Mode,
    since: Duration,
    told_lost: bool,
}

#[derive(Clone, Debug)]
enum Event {
    /// A machine has something due.
    Tick {
        process: usize,
        life: u32,
        server: usize,
    },
    /// A task goes on.
    Task {
        seat: Seat,
        step: TaskStep,
    },
    /// A request reaches its server.
    Request {
        process: usize,
        life: u32,
        server: usize,
        call: CallId,
        request: Box<Request>,
    },
    /// An answer reaches its process.
    Answer {
        process: usize,
        life: u32,
        server: usize,
        call: CallId,
        answer: Box<Answer>,
    },
    /// A call was not answered in time.
    TimeOut {
        process: usize,
        life: u32,
        server: usize,
        call: CallId,
    },
    /// A notice reaches its process.
    Notice {
        client: u64,
        server: usize,
        owner: Owner,
        notice: Notice,
    },
    Fault(Fault),
    Over(Fault),
    Look,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskStep {
    Ask,
    Cancel,
    Write,
    Done,
}

impl World {
    pub(super) fn new(seed: u64, options: &Options) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let plan = Plan::new(&mut random);
        let planted = PlantedBug::with(options.plant);
        // The last key is the marathon's own.
        let keys: Vec<Key> =
            (0..=plan.keys).map(|n| Key::new(format!("k{n}")).expect("a valid key")).collect();
        let servers = (0..plan.servers)
            .map(|_| Server {
                queue: LockTable::new(EPOCH_MICROS, planted),
                clock: Drifting {
                    per_mille: drift(&mut random, plan.drift),
                    offset: Duration::ZERO,
                },
                down: false,
                stopped: false,
                inbox: VecDeque::new(),
            })
            .collect();
        let mut world = World {
            checker: Checker::new(2 * (plan.keys + 1)),
            free_since: vec![None; plan.keys],
            now: Duration::ZERO,
            seq: 0,
            events: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            processes: Vec::new(),
            servers,
            keys,
            planted,
            plant: options.plant,
            clients: 0,
            troubled: Duration::ZERO,
            faults_on: 0,
            wants_log: options.log,
            report: Report::default(),
            random,
            plan,
        };
        for process in 0..world.plan.processes {
            let born = world.new_process(0);
            world.processes.push(born);
            world.start_tasks(process);
        }
        for (at, fault) in world.plan.faults.clone() {
            world.at(at, Event::Fault(fault));
        }
        let first_look = world.plan.faulty_for + LOOK;
        world.at(first_look, Event::Look);
        world
    }

    pub(super) fn play(mut self) -> Report {
        if self.wants_log {
            let _ = writeln!(self.report.log, "{:?}", self.plan);
        }
        let end = self.plan.day_ends + Duration::from_secs(4) + self.plan.call_timeout;
        while let Some(Reverse((at, seq, ()))) = self.events.pop() {
            if at > end || self.checker.violation.is_some() {
                break;
            }
            self.now = at;
            let Some(event) = self.happenings.remove(&seq) else { continue };
            self.log(|| format!("{event:?}"));
            self.happen(event);
        }
        self.now = end;
        self.judge_rest();
        self.report.violation = self.checker.violation.take();
        self.report
    }

    fn log(&mut self, line: impl FnOnce() -> String) {
        if self.wants_log {
            let now = self.now;
            let _ = writeln!(self.report.log, "{now:?} {}", line());
        }
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.seq += 1;
        self.events.push(Reverse((at, self.seq, ())));
        self.happenings.insert(self.seq, event);
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    fn chance(&mut self, of_a_hundred: u32) -> bool {
        of_a_hundred > 0 && self.random.random_ratio(of_a_hundred.min(100), 100)
    }

    fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let (least, most) = (least.as_nanos() as u64, most.as_nanos() as u64);
        Duration::from_nanos(self.random.random_range(least..=most.max(least)))
    }

    fn is_faulty(&self) -> bool {
        self.now < self.plan.faulty_for
    }

    fn longest_lease(&self) -> Duration {
        self.plan.ttl.mul_f64(1.1) + Duration::from_secs(1)
    }

    fn new_process(&mut self, life: u32) -> Process {
        self.clients += 1;
        let limits = Limits {
            handover: HandoverLimits { count: self.plan.handovers, time: self.plan.tenure },
            waiters: 100,
        };
        let machines = (0..self.plan.servers)
            .map(|_| Engine::new(limits, self.random.random(), self.planted))
            .collect();
        let clock = Drifting {
            per_mille: drift(&mut self.random, self.plan.drift),
            offset: Duration::from_nanos(self.random.random_range(0..10_000_000_000)),
        };
        let idle = Task {
            doing: Doing::Thinking,
            round: 0,
            ticket: None,
            key: 0,
            mode: Mode::Exclusive,
            since: Duration::ZERO,
            told_lost: false,
        };
        Process {
            life,
            client: self.clients,
            alive: true,
            paused: false,
            clock,
            machines,
            ticks: vec![Duration::MAX; self.plan.servers],
            unanswered: vec![BTreeMap::new(); self.plan.servers],
            tasks: vec![idle; self.plan.tasks],
            missed: VecDeque::new(),
        }
    }

    fn start_tasks(&mut self, process: usize) {
        for task in 0..self.plan.tasks {
            let seat = Seat { process, life: self.processes[process].life, task, round: 0 };
            let think = self.between(Duration::ZERO, self.plan.longest_think);
            self.after(think, Event::Task { seat, step: TaskStep::Ask });
        }
    }

    fn server_of(&self, key: usize) -> usize {
        key % self.plan.servers
    }

    /// Where the checker keeps a key's history: semaphores have keys of their own.
    fn history_of(&self, key: usize, mode: Mode) -> usize {
        if mode.is_permits() { self.keys.len() + key } else { key }
    }

    /// Lets a machine take a step and does what it calls for.
    fn step<T>(
        &mut self,
        process: usize,
        server: usize,
        step: impl FnOnce(&mut Engine<usize>, Moment, &mut Actions) -> T,
    ) -> T {
        let mut actions = Actions::new();
        let local = self.processes[process].clock.at(self.now);
        let result = step(&mut self.processes[process].machines[server], local, &mut actions);
        for action in actions {
            match action {
                Action::Call(call, request) => self.send(process, server, call, request),
                Action::Wake(ticket) => self.wake(process, server, ticket),
                Action::Lost(..) => self.report.losses += 1,
                _ => {}
            }
        }
        let due = self.processes[process].machines[server].next_due();
        if due < Moment::NEVER {
            let due = self.processes[process].clock.when(due).max(self.now);
            if due < self.processes[process].ticks[server] {
                self.processes[process].ticks[server] = due;
                let life = self.processes[process].life;
                self.at(due, Event::Tick { process, life, server });
            }
        }
        result
    }

    fn happen(&mut self, event: Event) {
        if let Some((process, life)) = self.addressee(&event) {
            let addressee = &mut self.processes[process];
            if !addressee.alive || life.is_some_and(|life| life != addressee.life) {
                return;
            }
            if addressee.paused {
                addressee.missed.push_back(event);
                return;
            }
        }
        match event {
            Event::Tick { process, server, .. } => {
                if self.processes[process].ticks[server] <= self.now {
                    self.processes[process].ticks[server] = Duration::MAX;
                }
                self.step(process, server, Engine::tick);
                self.judge_server(server);
            }
            Event::Task { seat, step } => self.task_step(seat, step),
            Event::Request { process, life, server, call, request } => {
                if self.servers[server].down {
                    return; // gone with the connection
                }
                if self.servers[server].stopped {
                    let event = Event::Request { process, life, server, call, request };
                    return self.servers[server].inbox.push_back(event);
                }
                self.serve(process, life, server, call, &request);
            }
            Event::Answer { process, server, call, answer, .. } => {
                self.answered(process, server, call, *answer);
            }
            Event::TimeOut { process, server, call, .. } => {
                if let Some(request) = self.processes[process].unanswered[server].get(&call) {
                    let answer = failed(request, ErrorKind::Unknown);
                    self.answered(process, server, call, answer);
                }
            }
            Event::Notice { client, server, owner, notice } => {
                let process = self.processes.iter().position(|process| process.client == client);
                let Some(process) = process else { return };
                self.step(process, server, |machine, now, actions| {
                    machine.notice(now, owner, notice, actions);
                });
                self.judge_server(server);
            }
            Event::Fault(fault) => self.begin(fault),
            Event::Over(fault) => self.end(fault),
            Event::Look => self.look(),
        }
    }

    /// The process that an event happens to, and in which of its lives.
    fn addressee(&self, event: &Event) -> Option<(usize, Option<u32>)> {
        match event {
            Event::Tick { process, life, .. }
            | Event::Answer { process, life, .. }
            | Event::TimeOut { process, life, .. } => Some((*process, Some(*life))),
            Event::Task { seat, .. } => Some((seat.process, Some(seat.life))),
            Event::Notice { client, .. } => {
                let process =
                    self.processes.iter().position(|process| process.client == *client)?;
                Some((process, None))
            }
            _ => None,
        }
    }
}

fn drift(random: &mut StdRng, most: i64) -> i64 {
    random.random_range(-most..=most)
}
