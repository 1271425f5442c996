//! The plan of a seed: the size of the simulation and its faults.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

/// The plan of one seed. Each kind of fault is turned on or off by chance, so that
/// some seeds have many kinds and some have one.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) servers: usize,
    pub(super) processes: usize,
    pub(super) tasks: usize,
    pub(super) keys: usize,
    pub(super) ttl: Duration,
    pub(super) call_timeout: Duration,
    pub(super) handovers: u32,
    pub(super) handover_time: Duration,
    /// Faults happen until then; tasks go on a while longer.
    pub(super) faulty_for: Duration,
    /// By then the effects of the faults have ended: pauses, leases of killed
    /// processes, locks granted to duplicated messages.
    pub(super) settled_at: Duration,
    /// Tasks request locks until then.
    pub(super) tasks_until: Duration,
    pub(super) longest_hold: Duration,
    longest_pause: Duration,
    /// Whether the tasks of the first process hand one lock to each other for longer than its
    /// ttl, and others come rarely.
    one_is_busy: bool,
    /// The percentage of shared requests; the fields below are percentages too.
    pub(super) shared: u32,
    pub(super) permits: u32,
    pub(super) fair: u32,
    pub(super) tries: u32,
    pub(super) cancels: u32,
    pub(super) downgrades: u32,
    pub(super) long_holds: u32,
    /// How many holders ask again inside their lock.
    pub(super) nested: u32,
    /// Whether an operator breaks locks, how often before and after the faults, and
    /// after which delay somebody else is let in.
    pub(super) breaks: bool,
    pub(super) break_delay: Duration,
    /// How many of a thousand messages are dropped, late or duplicated.
    pub(super) dropped: u32,
    pub(super) late: u32,
    pub(super) duplicated: u32,
    pub(super) latest: Duration,
    /// The largest drift of a clock, in parts per thousand.
    pub(super) drift: i64,
    /// Whether one task holds a key of its own until the end.
    pub(super) all_day_holder: bool,
    pub(super) faults: Vec<(Duration, Fault)>,
}

/// A fault of a process or a server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The process is paused, as by SIGSTOP, and resumed later.
    PauseProcess { process: usize, lasts: Duration },
    /// The process is killed, as by SIGKILL, and replaced by a new one later.
    KillProcess { process: usize, lasts: Duration },
    /// The process shuts down: it takes no new requests, after the grace it tells the
    /// rest that their locks are over, and later it ends and is replaced by a new one.
    ShutDown { process: usize, grace: Duration, lasts: Duration },
    /// The server stops reading and continues later.
    StopServer { server: usize, lasts: Duration },
    /// The server goes down and comes back, with or without its data.
    RestartServer { server: usize, lasts: Duration, loses_data: bool },
}

impl Fault {
    fn lasts(self) -> Duration {
        match self {
            Fault::PauseProcess { lasts, .. }
            | Fault::KillProcess { lasts, .. }
            | Fault::ShutDown { lasts, .. }
            | Fault::StopServer { lasts, .. }
            | Fault::RestartServer { lasts, .. } => lasts,
        }
    }
}

impl Plan {
    pub(super) fn new(random: &mut StdRng) -> Self {
        let processes = random.random_range(1..=4);
        let servers = random.random_range(1..=2);
        let crowd = random.random_ratio(1, 4);
        let tasks = if crowd { random.random_range(4..=8) } else { random.random_range(1..=3) };
        let ttl =
            Duration::from_millis(*[300, 1_000, 3_000, 30_000].choose(random).unwrap_or(&1_000));
        let faulty_for = Duration::from_millis(random.random_range(1_000..4_000));
        let mut some = |chance: u32, up_to: u32| {
            if random.random_ratio(chance, 100) { random.random_range(1..=up_to) } else { 0 }
        };
        let shared = some(40, 70);
        let permits = some(20, 40);
        let fair = some(40, 100);
        let tries = some(30, 30);
        let cancels = some(50, 40);
        let downgrades = some(20, 50);
        let long_holds = some(30, 30);
        let nested = some(30, 40);
        let dropped = some(30, 100);
        let late = some(40, 100);
        let duplicated = some(20, 50);
        let drift = i64::from(some(50, 8));
        let mut plan = Plan {
            servers,
            processes,
            tasks,
            keys: if crowd { 1 } else { random.random_range(1..=3) },
            ttl,
            call_timeout: Duration::from_millis(500),
            handovers: *[0, 2, 64].choose(random).unwrap_or(&64),
            handover_time: Duration::from_millis(*[5, 5, 1_000_000].choose(random).unwrap_or(&5)),
            faulty_for,
            settled_at: Duration::ZERO,
            tasks_until: Duration::ZERO,
            longest_hold: Duration::from_millis(random.random_range(1..80)),
            longest_pause: Duration::from_millis(random.random_range(100..1_000)),
            one_is_busy: random.random_ratio(1, 16),
            shared,
            permits,
            fair,
            tries,
            cancels,
            downgrades,
            long_holds,
            nested,
            breaks: random.random_ratio(1, 3),
            break_delay: Duration::from_millis(random.random_range(10..100)),
            dropped,
            late,
            duplicated,
            latest: Duration::from_millis(random.random_range(600..900)),
            drift,
            all_day_holder: random.random_ratio(1, 3),
            faults: Vec::new(),
        };
        if plan.one_is_busy {
            plan.make_one_busy(random);
        } else {
            plan.plan_faults(random);
        }
        plan.plan_end();
        plan
    }

    fn make_one_busy(&mut self, random: &mut StdRng) {
        *self = Plan {
            processes: random.random_range(2..=3),
            tasks: random.random_range(4..=8),
            keys: 1,
            ttl: Duration::from_millis(300),
            handovers: 256,
            handover_time: Duration::from_millis(50),
            longest_hold: Duration::from_millis(2),
            longest_pause: Duration::from_secs(4),
            shared: 0,
            permits: 0,
            fair: 0,
            cancels: 0,
            long_holds: 0,
            breaks: false,
            ..self.clone()
        };
    }

    /// The longest time between two requests of a task.
    pub(super) fn longest_pause(&self, process: usize) -> Duration {
        if self.one_is_busy && process == 0 { Duration::from_millis(1) } else { self.longest_pause }
    }

    fn plan_faults(&mut self, random: &mut StdRng) {
        let [pauses, kills, stops, restarts, ends] = [(); 5].map(|()| random.random_ratio(1, 3));
        let loses_data = random.random_ratio(1, 3);
        for _ in 0..random.random_range(0..4) {
            let at = self.faulty_for.mul_f64(random.random_range(0.05..0.95));
            let process = random.random_range(0..self.processes);
            let server = random.random_range(0..self.servers);
            let short = Duration::from_millis(random.random_range(50..1_500));
            let around_ttl =
                self.ttl.min(Duration::from_secs(1)).mul_f64(random.random_range(0.3..3.0));
            let fault = match random.random_range(0..5) {
                0 if pauses => Fault::PauseProcess { process, lasts: around_ttl },
                1 if kills => Fault::KillProcess { process, lasts: short },
                2 if stops => Fault::StopServer { server, lasts: around_ttl },
                // A restart without data takes longer than a second: tokens
                // start from the server's time.
                3 if restarts && loses_data => Fault::RestartServer {
                    server,
                    lasts: short + Duration::from_secs(1),
                    loses_data: true,
                },
                3 if restarts => Fault::RestartServer { server, lasts: short, loses_data: false },
                4 if ends => {
                    let grace = Duration::from_millis(random.random_range(0..300));
                    Fault::ShutDown { process, grace, lasts: grace + short }
                }
                _ => continue,
            };
            self.faults.push((at, fault));
        }
    }

    fn plan_end(&mut self) {
        let ends =
            |fault: &Fault| matches!(fault, Fault::KillProcess { .. } | Fault::ShutDown { .. });
        let kills = self.faults.iter().any(|(_, fault)| ends(fault));
        let leaves_leases = kills || self.allows_late_grants();
        if leaves_leases {
            self.ttl = self.ttl.min(Duration::from_secs(3)); // so that the run sees their end
        }
        let last_message = self.faulty_for + self.latest;
        let over = self
            .faults
            .iter()
            .map(|(at, fault)| *at + fault.lasts())
            .fold(last_message, Duration::max);
        let left = if leaves_leases { self.ttl.mul_f64(1.1) } else { Duration::from_millis(1_500) };
        self.settled_at = over + left;
        self.tasks_until = self.settled_at + Duration::from_millis(4_500);
    }

    /// Whether a message may arrive later than the keeper expects, so that a lock may
    /// be granted that nobody wants, and lasts for its ttl.
    pub(super) fn allows_late_grants(&self) -> bool {
        self.duplicated > 0
    }
}
