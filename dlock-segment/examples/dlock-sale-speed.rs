//! Measures how fast an inventory is, compared with `redis-benchmark -P 100` of one
//! conditional decrement, in one run on one Redis:
//!
//! ```text
//! cargo run --release -p dlock-segment --example dlock-sale-speed -- [rounds] [seconds]
//! ```

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_segment::{Inventory, SegmentOutcome, SegmentedLock};
use dlock_testkit::redis::RedisServer;

const TASKS: usize = 1_000;
const DECREMENT: &str = "local n = tonumber(redis.call('GET', KEYS[1])) \
    if n >= tonumber(ARGV[1]) then return redis.call('DECRBY', KEYS[1], ARGV[1]) end return -1";

/// The options of the deductions.
#[derive(Clone, Copy, PartialEq)]
enum Carries {
    Nothing,
    Id,
    IdAndBuyer,
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|it| it.parse::<u64>().expect("a number"));
    let rounds = arguments.next().unwrap_or(3);
    let time = Duration::from_secs(arguments.next().unwrap_or(3));
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");

    let mut table = Table::default();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        table.add("yardstick: redis-benchmark -P 100, EVALSHA each", yardstick(&server));
        for (name, carries, journal) in [
            ("deduct", Carries::Nothing, false),
            ("deduct with operation id", Carries::Id, false),
            ("deduct with id, buyer limit and journal", Carries::IdAndBuyer, true),
        ] {
            let sale = fresh(&dlock, 4_000_000_000, 16, carries, journal).await;
            table.add(name, rate(&sale, TASKS, time, carries).await);
        }
        let memory = dlock::testing::client();
        let sale = fresh(&memory, 4_000_000_000, 16, Carries::Nothing, false).await;
        table.add("memory: deduct", rate(&sale, 2, time, Carries::Nothing).await);
    }
    table.print();

    println!("\nmedian of one call, 50 tasks");
    for round in 0..rounds {
        let each = one_evalsha_each(&server, 50, time).await;
        let sale = fresh(&dlock, 4_000_000_000, 16, Carries::Nothing, false).await;
        let deduct = median(&sale, 50, time).await;
        println!("  round {round}: deduct {deduct:?}, one EVALSHA each {each:?}");
    }

    println!("\nlayer one: 1,000 tasks, a body that sleeps 1 ms");
    for (url, what) in [("memory://speed".to_owned(), "memory"), (server.url(), "redis")] {
        let dlock = Dlock::connect(&url).await.expect("a client");
        let one = bodies(&dlock, 1, time).await;
        let twenty = bodies(&dlock, 20, time).await;
        println!("  {what}: one lock {one:.0}/s, 20 segments {twenty:.0}/s: {:.1} x", twenty / one);
    }

    println!("\ncost of a deduction, nanoseconds; 1,000 tasks on Redis, 2 in memory");
    println!("  segments      units  state        redis    memory");
    let memory = dlock::testing::client();
    for (segments, units) in
        [(1, 1_000_000_000), (16, 1_000_000_000), (64, 1_000_000_000), (256, 1_000_000_000)]
    {
        let cost = costs(&dlock, &memory, segments, units, time).await;
        println!("  {segments:8} {units:10}  full      {:8.0}  {:8.1}", cost.0, cost.1);
    }
    for segments in [1, 16, 64, 256] {
        let cost = nearly_dry(&dlock, &memory, segments, time).await;
        println!("  {segments:8} {:>10}  almost dry{:8.0}  {:8.1}", "few", cost.0, cost.1);
    }
    for units in [1_000, 10_000, 100_000, 1_000_000, 10_000_000] {
        let cost = costs(&dlock, &memory, 16, units, time).await;
        println!("  {:8} {units:10}  kept up   {:8.0}  {:8.1}", 16, cost.0, cost.1);
    }
    println!("\nbytes of the server's memory, ids of 20 bytes");
    let [plain, buyer] = [bytes(&dlock, &server, false).await, bytes(&dlock, &server, true).await];
    println!("  an operation {plain:.0}; with a buyer of its own {buyer:.0}");
    println!("\n{}", server.cli(&["info", "server"]).lines().nth(1).unwrap_or_default());
}

/// The time that one operation takes.
async fn bytes(dlock: &Dlock, server: &RedisServer, with_buyer: bool) -> f64 {
    const OPERATIONS: u64 = 100_000;
    let sale = fresh(dlock, OPERATIONS, 16, Carries::Id, false).await;
    let used = || {
        let info = server.cli(&["info", "memory"]);
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
        used.and_then(|used| used.trim().parse::<f64>().ok()).expect("used_memory")
    };
    tokio::time::sleep(Duration::from_secs(1)).await; // what was removed is freed by and by
    let before = used();
    let tasks = (0..OPERATIONS).map(|number| {
        let sale = sale.clone();
        tokio::spawn(async move {
            let deduct = sale.deduct(1).operation(format!("order-{number:014}"));
            let deduct = match with_buyer {
                true => deduct.buyer(format!("buyer-{number:014}")),
                false => deduct,
            };
            let _ = deduct.send().await.expect("an answer");
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("no panic");
    }
    let bytes = (used() - before) / OPERATIONS as f64;
    sale.remove().await.expect("removed");
    bytes
}

#[derive(Default)]
struct Table(Vec<(String, Vec<f64>)>);

impl Table {
    fn add(&mut self, name: &str, rate: f64) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, rates)) => rates.push(rate),
            None => self.0.push((name.to_owned(), vec![rate])),
        }
    }

    fn print(&mut self) {
        println!("a second, median of the rounds (least to most)");
        let mut yardstick = 0.0;
        for (name, rates) in &mut self.0 {
            rates.sort_by(f64::total_cmp);
            let median = rates[rates.len() / 2];
            if yardstick == 0.0 {
                yardstick = median;
            }
            let (least, most) = (rates[0], rates[rates.len() - 1]);
            let times = median / yardstick;
            println!("  {name:50} {median:11.0}  {times:5.2} x  ({least:.0} to {most:.0})");
        }
    }
}

async fn fresh(
    dlock: &Dlock,
    units: u64,
    segments: u32,
    carries: Carries,
    journal: bool,
) -> Inventory {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("speed-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let mut sale = Inventory::builder(dlock, name).stock(units).segments(segments);
    if carries == Carries::IdAndBuyer {
        sale = sale.per_buyer(u64::from(u32::MAX));
    }
    if journal {
        sale = sale.journal(100_000);
    }
    sale.sold_out_for(Duration::ZERO).create().await.expect("a sale")
}

/// Measures deductions per second.
async fn rate(sale: &Inventory, tasks: usize, time: Duration, carries: Carries) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let (sale, stop) = (sale.clone(), stop.clone());
            tokio::spawn(async move {
                let mut done = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let deduct = sale.deduct(1);
                    let deduct = match carries {
                        Carries::Nothing => deduct,
                        Carries::Id => deduct.operation(format!("order-{task}-{done}")),
                        Carries::IdAndBuyer => deduct
                            .operation(format!("order-{task}-{done}"))
                            .buyer(format!("buyer-{}", (task as u64 + done) % 10_000)),
                    };
                    let _ = deduct.send().await.expect("an answer");
                    done += 1;
                    if done.is_multiple_of(128) {
                        tokio::task::yield_now().await; // the embedded store never waits
                    }
                }
                done
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let mut done = 0;
    for task in running {
        done += task.await.expect("no panic");
    }
    let rate = done as f64 / began.elapsed().as_secs_f64();
    sale.remove().await.expect("removed");
    rate
}

async fn median(sale: &Inventory, tasks: usize, time: Duration) -> Duration {
    let until = Instant::now() + time;
    let running = (0..tasks).map(|_| {
        let sale = sale.clone();
        tokio::spawn(async move {
            let mut times = Vec::new();
            while Instant::now() < until {
                let began = Instant::now();
                let _ = sale.deduct(1).send().await.expect("an answer");
                times.push(began.elapsed());
            }
            times
        })
    });
    middle(running.collect()).await
}

async fn middle(running: Vec<tokio::task::JoinHandle<Vec<Duration>>>) -> Duration {
    let mut times = Vec::new();
    for task in running {
        times.extend(task.await.expect("no panic"));
    }
    times.sort_unstable();
    times[times.len() / 2]
}

async fn one_evalsha_each(server: &RedisServer, tasks: usize, time: Duration) -> Duration {
    let sha = server.cli(&["script", "load", DECREMENT]);
    server.cli(&["set", "yardstick", "4000000000"]);
    let client = redis::Client::open(server.url()).expect("a URL");
    let connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let until = Instant::now() + time;
    let running = (0..tasks).map(|_| {
        let (mut connection, sha) = (connection.clone(), sha.clone());
        tokio::spawn(async move {
            let mut times = Vec::new();
            while Instant::now() < until {
                let began = Instant::now();
                let mut command = redis::cmd("EVALSHA");
                command.arg(&sha).arg(1).arg("yardstick").arg(1);
                let _: i64 = command.query_async(&mut connection).await.expect("an answer");
                times.push(began.elapsed());
            }
            times
        })
    });
    middle(running.collect()).await
}

fn yardstick(server: &RedisServer) -> f64 {
    let sha = server.cli(&["script", "load", DECREMENT]);
    server.cli(&["set", "yardstick", "4000000000"]);
    let port = server.url().rsplit(':').next().expect("a port").to_owned();
    let output = Command::new("redis-benchmark")
        .args(["-p", &port, "-P", "100", "-n", "1000000", "-q", "--csv"])
        .args(["evalsha", &sha, "1", "yardstick", "1"])
        .output()
        .expect("redis-benchmark comes with redis-server");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    let rate = line.rsplit("\",\"").nth(6).or_else(|| line.split("\",\"").nth(1));
    rate.and_then(|rate| rate.trim_matches('"').parse().ok()).unwrap_or_else(|| {
        panic!("redis-benchmark said: {text}");
    })
}

/// Measures how many bodies per second run under the locks of this many segments.
async fn bodies(dlock: &Dlock, segments: u32, time: Duration) -> f64 {
    let stock = SegmentedLock::new(dlock, format!("layer-{segments}"), segments).wait_unlimited();
    let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let running: Vec<_> = (0..TASKS)
        .map(|_| {
            let (stock, done, stop) = (stock.clone(), done.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let body = |_, _| async {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                        Ok::<_, dlock::Error>(SegmentOutcome::Done(()))
                    };
                    stock.run(body).await.expect("a segment");
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let began = Instant::now();
    tokio::time::sleep(time).await;
    let rate = done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for task in running {
        task.await.expect("no panic");
    }
    rate
}

/// With plenty of stock: an inventory that runs out is restocked.
async fn costs(
    dlock: &Dlock,
    memory: &Dlock,
    segments: u32,
    units: u64,
    time: Duration,
) -> (f64, f64) {
    let mut costs = [0.0; 2];
    for (cost, (place, tasks)) in costs.iter_mut().zip([(dlock, TASKS), (memory, 2)]) {
        let sale = fresh(place, units, segments, Carries::Nothing, false).await;
        let (keeper, stop) = (sale.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let keeping = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                if keeper.stock().await.is_ok_and(|stock| stock.available < units / 2) {
                    let _ = keeper.restock(units / 2).send().await; // at the end it is removed
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        let rate = rate_kept(&sale, tasks, time, &stop, keeping).await;
        *cost = 1e9 / rate;
    }
    (costs[0], costs[1])
}

async fn rate_kept(
    sale: &Inventory,
    tasks: usize,
    time: Duration,
    stop: &AtomicBool,
    keeping: tokio::task::JoinHandle<()>,
) -> f64 {
    let stopping = async {
        tokio::time::sleep(time).await;
        stop.store(true, Ordering::Relaxed);
    };
    let (rate, ()) = tokio::join!(rate(sale, tasks, time, Carries::Nothing), stopping);
    let _ = keeping.await;
    rate
}

/// A few units in random segments are given back all the time; most requests are answered
/// "sold out".
async fn nearly_dry(dlock: &Dlock, memory: &Dlock, segments: u32, time: Duration) -> (f64, f64) {
    let mut costs = [0.0; 2];
    for (cost, (place, tasks)) in costs.iter_mut().zip([(dlock, TASKS), (memory, 2)]) {
        let sale = fresh(place, 1, segments, Carries::Nothing, false).await;
        let (keeper, stop) = (sale.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let keeping = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                let _ = keeper.restock(5).send().await; // at the end it is removed
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        *cost = 1e9 / rate_kept(&sale, tasks, time, &stop, keeping).await;
    }
    (costs[0], costs[1])
}
