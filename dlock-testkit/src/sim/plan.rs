//! What a seed plans: the size of the world and its faults.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

/// The world of one seed. Faults are switched on and off one by one, so that
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
    pub(super) tenure: Duration,
    /// Until then faults happen; tasks go on a while longer.
    pub(super) faulty_for: Duration,
    /// From then on what the faults left has ended: pauses, leases of the dead,
    /// ghosts of doubled messages.
    pub(super) settled: Duration,
    /// Tasks ask for locks until then.
    pub(super) day_ends: Duration,
    pub(super) longest_hold: Duration,
    pub(super) longest_think: Duration,
    /// Out of a hundred.
    pub(super) shared: u32,
    pub(super) permits: u32,
    pub(super) fair: u32,
    pub(super) tries: u32,
    pub(super) cancels: u32,
    pub(super) downgrades: u32,
    pub(super) long_holds: u32,
    /// Out of a thousand messages.
    pub(super) dropped: u32,
    pub(super) late: u32,
    pub(super) duplicated: u32,
    pub(super) latest: Duration,
    /// Clocks run up to this many parts in a thousand fast or slow.
    pub(super) drift: i64,
    /// Whether one task holds a key of its own all day.
    pub(super) marathon: bool,
    pub(super) faults: Vec<(Duration, Fault)>,
}

/// Something that happens to a process or a server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// SIGSTOP, and SIGCONT later.
    PauseProcess { process: usize, lasts: Duration },
    /// SIGKILL, and a new process later.
    KillProcess { process: usize, lasts: Duration },
    /// The server stops reading and goes on later, where it was.
    StopServer { server: usize, lasts: Duration },
    /// The server is gone and comes back, with or without its data.
    RestartServer { server: usize, lasts: Duration, forgets: bool },
}

impl Fault {
    fn lasts(self) -> Duration {
        match self {
            Fault::PauseProcess { lasts, .. }
            | Fault::KillProcess { lasts, .. }
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
            tenure: Duration::from_millis(*[5, 5, 1_000_000].choose(random).unwrap_or(&5)),
            faulty_for,
            settled: Duration::ZERO,
            day_ends: Duration::ZERO,
            longest_hold: Duration::from_millis(random.random_range(1..80)),
            longest_think: Duration::from_millis(random.random_range(100..1_000)),
            shared,
            permits,
            fair,
            tries,
            cancels,
            downgrades,
            long_holds,
            dropped,
            late,
            duplicated,
            latest: Duration::from_millis(random.random_range(600..900)),
            drift,
            marathon: random.random_ratio(1, 3),
            faults: Vec::new(),
        };
        plan.plan_faults(random);
        plan.plan_calm();
        plan
    }

    fn plan_faults(&mut self, random: &mut StdRng) {
        let [pauses, kills, stops, restarts] = [(); 4].map(|()| random.random_ratio(1, 3));
        let forgets = random.random_ratio(1, 3);
        for _ in 0..random.random_range(0..4) {
            let at = self.faulty_for.mul_f64(random.random_range(0.05..0.95));
            let process = random.random_range(0..self.processes);
            let server = random.random_range(0..self.servers);
            let short = Duration::from_millis(random.random_range(50..1_500));
            let around_ttl =
                self.ttl.min(Duration::from_secs(1)).mul_f64(random.random_range(0.3..3.0));
            let fault = match random.random_range(0..4) {
                0 if pauses => Fault::PauseProcess { process, lasts: around_ttl },
                1 if kills => Fault::KillProcess { process, lasts: short },
                2 if stops => Fault::StopServer { server, lasts: around_ttl },
                // A restart without data takes longer than a second: tokens
                // start from the server's time.
                3 if restarts && forgets => Fault::RestartServer {
                    server,
                    lasts: short + Duration::from_secs(1),
                    forgets: true,
                },
                3 if restarts => Fault::RestartServer { server, lasts: short, forgets: false },
                _ => continue,
            };
            self.faults.push((at, fault));
        }
    }

    fn plan_calm(&mut self) {
        let kills = self.faults.iter().any(|(_, fault)| matches!(fault, Fault::KillProcess { .. }));
        let leaves_leases = kills || self.allows_ghosts();
        if leaves_leases {
            self.ttl = self.ttl.min(Duration::from_secs(3)); // to see the end of them
        }
        let last_message = self.faulty_for + self.latest;
        let over = self
            .faults
            .iter()
            .map(|(at, fault)| *at + fault.lasts())
            .fold(last_message, Duration::max);
        let left = if leaves_leases { self.ttl.mul_f64(1.1) } else { Duration::from_millis(1_500) };
        self.settled = over + left;
        self.day_ends = self.settled + Duration::from_millis(4_500);
    }

    /// Whether a message may come later than the keeper reckons with, so that a
    /// ghost lock may live for its ttl.
    pub(super) fn allows_ghosts(&self) -> bool {
        self.duplicated > 0
    }
}
