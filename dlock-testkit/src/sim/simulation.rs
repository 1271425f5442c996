//! The simulation of one seed: its processes, servers, clocks and events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use dlock::backend::memory::lock_table::LockTable;
use dlock::backend::{Moment, Request};
use dlock::machine::{Action, Actions, CallId, Engine, Limits, Ticket};
use dlock::machine::{Bug, HandoverLimits, PlantedBug};
use dlock::{Key, Mode};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::checker::Checker;
use super::plan::Plan;
use super::{Options, Report};

mod checks;
mod drifting_clock;
mod events;
mod network;
mod operators;
mod tasks;

use self::drifting_clock::DriftingClock;
use self::events::{Event, TaskStep};

/// One lock request of a task: the process and its incarnation, the task, and the
/// number of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaskRun {
    pub(super) process: usize,
    pub(super) incarnation: u32,
    pub(super) task: usize,
    pub(super) round: u32,
}

/// The server's time when the simulation starts, in microseconds.
const EPOCH_MICROS: u64 = 1_700_000_000_000_000;
/// How often the simulation looks for stalls once faults are over.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// How long a task may wait for a free lock. A lost message costs about a second, and
/// a call its time-out.
const STALL: Duration = Duration::from_millis(2_500);
/// The longest time for which a task holds a lock once faults are over.
const CALM_HOLD: Duration = Duration::from_millis(10);
/// The longest wait once faults are over: for 32 tasks, in the order of four processes.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

pub(super) struct Simulation {
    plan: Plan,
    random: StdRng,
    now: Duration,
    seq: u64,
    events: BinaryHeap<Reverse<(Duration, u64, Pending)>>,
    scheduled: BTreeMap<u64, Event>,
    processes: Vec<Process>,
    servers: Vec<Server>,
    keys: Vec<Key>,
    checker: Checker,
    /// Since when a key has been free at every check.
    free_since: Vec<Option<Duration>>,
    planted: PlantedBug,
    plant: Option<Bug>,
    clients: u64,
    /// When a message was last lost or late, or a fault ended.
    last_trouble: Duration,
    active_faults: u32,
    /// The clients that shut down and owed nothing in the end.
    shut_down: Vec<u64>,
    /// How many locks may still be broken once faults are over.
    calm_breaks: u32,
    wants_log: bool,
    report: Report,
}

/// A placeholder: events are ordered by time and number only.
type Pending = ();

struct Process {
    incarnation: u32,
    client: u64,
    alive: bool,
    paused: bool,
    shutting_down: bool,
    clock: DriftingClock,
    /// One machine for each server.
    machines: Vec<Engine<usize>>,
    ticks: Vec<Duration>,
    unanswered: Vec<BTreeMap<CallId, Request>>,
    tasks: Vec<Task>,
    /// The events that wait until the process is resumed.
    deferred: VecDeque<Event>,
}

struct Server {
    queue: LockTable,
    clock: DriftingClock,
    down: bool,
    stopped: bool,
    inbox: VecDeque<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskState {
    Idle,
    Waiting,
    Holding,
    Releasing,
}

#[derive(Clone, Debug)]
struct Task {
    state: TaskState,
    round: u32,
    ticket: Option<Ticket>,
    key: usize,
    mode: Mode,
    since: Duration,
    loss_reported: bool,
    /// The holder inside whose lock it asked.
    inside: Option<TaskRun>,
}

impl Simulation {
    pub(super) fn new(seed: u64, options: &Options) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let plan = Plan::new(&mut random);
        let planted = PlantedBug::with(options.plant);
        // The last key is for the task that holds one until the end.
        let keys: Vec<Key> =
            (0..=plan.keys).map(|n| Key::new(format!("k{n}")).expect("a valid key")).collect();
        let servers = (0..plan.servers)
            .map(|_| Server {
                queue: LockTable::new(EPOCH_MICROS, planted),
                clock: DriftingClock {
                    per_mille: drift(&mut random, plan.drift),
                    offset: Duration::ZERO,
                },
                down: false,
                stopped: false,
                inbox: VecDeque::new(),
            })
            .collect();
        let mut simulation = Simulation {
            checker: Checker::new(2 * (plan.keys + 1)),
            free_since: vec![None; plan.keys],
            now: Duration::ZERO,
            seq: 0,
            events: BinaryHeap::new(),
            scheduled: BTreeMap::new(),
            processes: Vec::new(),
            servers,
            keys,
            planted,
            plant: options.plant,
            clients: 0,
            last_trouble: Duration::ZERO,
            active_faults: 0,
            shut_down: Vec::new(),
            calm_breaks: 3,
            wants_log: options.log,
            report: Report::default(),
            random,
            plan,
        };
        for process in 0..simulation.plan.processes {
            let started = simulation.new_process(0);
            simulation.processes.push(started);
            simulation.start_tasks(process);
        }
        for (at, fault) in simulation.plan.faults.clone() {
            simulation.at(at, Event::Fault(fault));
        }
        simulation.plan_breaks();
        let first_check = simulation.plan.faulty_for + CHECK_INTERVAL;
        simulation.at(first_check, Event::CheckProgress);
        simulation
    }

    pub(super) fn run(mut self) -> Report {
        if self.wants_log {
            let _ = writeln!(self.report.log, "{:?}", self.plan);
        }
        let end = self.plan.tasks_until + Duration::from_secs(4) + self.plan.call_timeout;
        while let Some(Reverse((at, seq, ()))) = self.events.pop() {
            if at > end || self.checker.violation.is_some() {
                break;
            }
            self.now = at;
            let Some(event) = self.scheduled.remove(&seq) else { continue };
            self.log(|| format!("{event:?}"));
            self.handle(event);
        }
        self.now = end;
        self.check_nothing_left();
        (0..self.processes.len()).for_each(|process| self.count_coverage(process));
        self.report.violation = self.checker.violation.take();
        self.report
    }

    fn log(&mut self, line: impl FnOnce() -> String) {
        if self.wants_log {
            let now = self.now;
            let _ = writeln!(self.report.log, "{now:?} {}", line());
        }
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

    fn new_process(&mut self, incarnation: u32) -> Process {
        self.clients += 1;
        let limits = Limits {
            handover: HandoverLimits {
                count: self.plan.handovers,
                time: self.plan.handover_time,
                extend_after: 2,
            },
            waiters: 100,
            attempt: Duration::from_secs(1),
        };
        let machines = (0..self.plan.servers)
            .map(|_| Engine::new(limits, self.random.random(), self.planted))
            .collect();
        let clock = DriftingClock {
            per_mille: drift(&mut self.random, self.plan.drift),
            offset: Duration::from_nanos(self.random.random_range(0..10_000_000_000)),
        };
        let idle = Task {
            state: TaskState::Idle,
            round: 0,
            ticket: None,
            key: 0,
            mode: Mode::Exclusive,
            since: Duration::ZERO,
            loss_reported: false,
            inside: None,
        };
        Process {
            incarnation,
            client: self.clients,
            alive: true,
            paused: false,
            shutting_down: false,
            clock,
            machines,
            ticks: vec![Duration::MAX; self.plan.servers],
            unanswered: vec![BTreeMap::new(); self.plan.servers],
            // Two more for each task, which ask inside its lock.
            tasks: vec![idle; 3 * self.plan.tasks],
            deferred: VecDeque::new(),
        }
    }

    fn start_tasks(&mut self, process: usize) {
        for task in 0..self.plan.tasks {
            let run = TaskRun {
                process,
                incarnation: self.processes[process].incarnation,
                task,
                round: 0,
            };
            let pause = self.between(Duration::ZERO, self.plan.longest_pause(process));
            self.after(pause, Event::Task { run, step: TaskStep::Ask });
        }
    }

    fn server_of(&self, key: usize) -> usize {
        key % self.plan.servers
    }

    /// The number of the history in the checker: semaphores have histories of their own.
    fn history_of(&self, key: usize, mode: Mode) -> usize {
        if mode.is_permits() { self.keys.len() + key } else { key }
    }

    /// Lets a machine take a step and performs the actions that it returns.
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
                let incarnation = self.processes[process].incarnation;
                self.at(due, Event::Tick { process, incarnation, server });
            }
        }
        result
    }
}

fn drift(random: &mut StdRng, most: i64) -> i64 {
    random.random_range(-most..=most)
}
