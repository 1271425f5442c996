//! How one sale over many servers grows: a simulation of homes on primaries that have a core
//! each, with what a call costs them as measured.
//!
//! ```text
//! cargo run --release -p dlock-segment --example dlock-homes-model [MICROS_PER_CALL MICROS_PER_DEDUCTION]
//! ```
//!
//! Processes have tasks that buy one unit after the other. A deduction waits in its process for
//! the batch of its home; each process has one call to a home under way, of at most 256
//! deductions, as `inventory::combiner` does it. A primary runs one call at a time. The time in
//! the network is added; that in the clients is not: there are enough of them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The most deductions of one call.
const BATCH: usize = 256;
const HOMES_OF_A_PRIMARY: usize = 2;
/// There and back, in nanoseconds.
const NETWORK: u64 = 200_000;
const WARM_UP: u64 = 20_000_000;
const MEASURED: u64 = 80_000_000;

/// Primaries, processes, and tasks of each process. The first two are those that were measured.
const CASES: [(usize, usize, usize); 8] = [
    (3, 1, 500),
    (3, 1, 3_000),
    (1, 1, 3_000),
    (3, 3, 3_000),
    (10, 10, 3_000),
    (10, 10, 10_000),
    (100, 100, 10_000),
    (100, 20, 50_000),
];

/// What a call costs its primary, in nanoseconds.
#[derive(Clone, Copy)]
struct Cost {
    call: u64,
    deduction: u64,
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A call of this sender has reached its primary.
    Reached { sender: usize },
    /// The primary has worked on it.
    Worked { sender: usize },
    /// Its answer is back.
    Answered { sender: usize },
}

/// A home, as one process sends to it.
#[derive(Default)]
struct Sender {
    /// When each task began that waits here.
    pending: VecDeque<u64>,
    under_way: Vec<u64>,
}

struct Model {
    cost: Cost,
    homes: usize,
    now: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    senders: Vec<Sender>,
    processes: usize,
    /// The calls that wait at each primary; the first one is worked on.
    primaries: Vec<VecDeque<usize>>,
    random: StdRng,
    measured: Figures,
}

#[derive(Default)]
struct Figures {
    sold: u64,
    calls: u64,
    busy: u64,
    took: Vec<u64>,
}

impl Model {
    fn new(cost: Cost, primaries: usize, processes: usize) -> Self {
        let homes = primaries * HOMES_OF_A_PRIMARY;
        Model {
            cost,
            homes,
            now: 0,
            events: BinaryHeap::new(),
            senders: (0..processes * homes).map(|_| Sender::default()).collect(),
            processes,
            primaries: vec![VecDeque::new(); primaries],
            random: StdRng::seed_from_u64(1),
            measured: Figures::default(),
        }
    }

    fn at(&mut self, after: u64, event: Event) {
        self.events.push(Reverse((self.now + after, event)));
    }

    /// A task of this process buys the next unit, in the home of its id.
    fn buy(&mut self, process: usize) {
        let sender = process * self.homes + self.random.random_range(0..self.homes);
        self.senders[sender].pending.push_back(self.now);
        self.try_to_send(sender);
    }

    fn try_to_send(&mut self, at: usize) {
        let Sender { pending, under_way } = &mut self.senders[at];
        if !under_way.is_empty() || pending.is_empty() {
            return;
        }
        let count = pending.len().min(BATCH);
        *under_way = pending.drain(..count).collect();
        self.at(NETWORK / 2, Event::Reached { sender: at });
    }

    fn work(&mut self, primary: usize) {
        let Some(&sender) = self.primaries[primary].front() else { return };
        let count = self.senders[sender].under_way.len() as u64;
        let takes = self.cost.call + self.cost.deduction * count;
        if self.now >= WARM_UP {
            self.measured.calls += 1;
            self.measured.sold += count;
            self.measured.busy += takes;
        }
        self.at(takes, Event::Worked { sender });
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Reached { sender } => {
                let primary = sender % self.homes / HOMES_OF_A_PRIMARY;
                self.primaries[primary].push_back(sender);
                if self.primaries[primary].len() == 1 {
                    self.work(primary);
                }
            }
            Event::Worked { sender } => {
                let primary = sender % self.homes / HOMES_OF_A_PRIMARY;
                self.primaries[primary].pop_front();
                self.work(primary);
                self.at(NETWORK / 2, Event::Answered { sender });
            }
            Event::Answered { sender } => {
                let answered = std::mem::take(&mut self.senders[sender].under_way);
                self.try_to_send(sender);
                for began in answered {
                    if began >= WARM_UP {
                        self.measured.took.push(self.now - began);
                    }
                    self.buy(sender / self.homes);
                }
            }
        }
    }

    fn run(mut self, tasks: usize) -> Figures {
        for process in 0..self.processes {
            (0..tasks).for_each(|_| self.buy(process));
        }
        while let Some(Reverse((at, event))) = self.events.pop() {
            if at >= WARM_UP + MEASURED {
                break;
            }
            self.now = at;
            self.step(event);
        }
        self.measured
    }
}

fn main() {
    let arguments: Vec<f64> = std::env::args().skip(1).filter_map(|it| it.parse().ok()).collect();
    let [call, deduction] = arguments[..] else {
        eprintln!("usage: dlock-homes-model MICROS_PER_CALL MICROS_PER_DEDUCTION");
        std::process::exit(2);
    };
    let nanos = |micros: f64| (micros * 1_000.0) as u64;
    let cost = Cost { call: nanos(call), deduction: nanos(deduction) };
    println!(
        "| primaries | processes x tasks | deductions/s | in a call | server time each | p50 | p99 |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (primaries, processes, tasks) in CASES {
        let Figures { sold, calls, busy, mut took } =
            Model::new(cost, primaries, processes).run(tasks);
        took.sort_unstable();
        let millis = |part: f64| took[(took.len() as f64 * part) as usize] as f64 / 1e6;
        println!(
            "| {primaries} | {processes} x {tasks} | {:.0} | {:.0} | {:.1} µs | {:.1} ms | {:.1} ms |",
            sold as f64 * 1e9 / MEASURED as f64,
            sold as f64 / calls as f64,
            busy as f64 / 1_000.0 / sold as f64,
            millis(0.5),
            millis(0.99),
        );
    }
}
