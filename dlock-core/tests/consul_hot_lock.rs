//! A lock that many tasks of one process want all the time is left to others many times a
//! second, although Consul does not say that they wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_testkit::consul::ConsulServer;
use dlock_testkit::interop::Peer;
use tokio::task::JoinSet;

/// The tasks of the process.
const TASKS: usize = 20;
/// How often somebody else must get the lock meanwhile.
const TURNS: usize = 5;
/// That takes about a second. A busy machine may need more.
const TOO_LONG: Duration = Duration::from_secs(60);

fn client(server: &ConsulServer) -> Dlock {
    let url = format!("{}&ttl=20s&layout=lock-key", server.url());
    Dlock::builder().url(&url).wait(Duration::from_secs(60)).connect_lazy().expect("a client")
}

/// Tasks that take the lock again and again.
struct Load {
    stops: Arc<AtomicBool>,
    cycles: Arc<AtomicU64>,
    tasks: JoinSet<()>,
}

impl Load {
    fn start(dlock: &Dlock) -> Self {
        let (stops, cycles) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let (dlock, stops, cycles) = (dlock.clone(), stops.clone(), cycles.clone());
            tasks.spawn(async move {
                while !stops.load(Ordering::Relaxed) {
                    let guard = dlock.mutex("hot").lock().await.expect("the lock");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    drop(guard);
                    cycles.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Load { stops, cycles, tasks }
    }

    async fn stop(self) -> u64 {
        self.stops.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
        self.cycles.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_with_the_go_package_gets_its_turn() {
    let Some(server) = ConsulServer::start() else { return };
    let Some(mut peer) = Peer::consul(server.port(), "mutex", "hot", "15s") else { return };
    let load = Load::start(&client(&server));
    peer.go();
    let began = Instant::now();
    let mut turns = 0;
    while turns < TURNS {
        assert!(began.elapsed() < TOO_LONG, "{turns} turns in {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
        turns += peer.new_spans(0).len();
    }
    println!("{turns} turns in {:?}", began.elapsed());
    peer.process.send_line("stop");
    peer.process.wait_for_exit(TOO_LONG);
    let cycles = load.stop().await;
    assert!(cycles > 0, "the tasks of dlock get their turn too");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_of_dlock_gets_its_turn() {
    let Some(server) = ConsulServer::start() else { return };
    let (busy, other) = (client(&server), client(&server));
    let load = Load::start(&busy);
    let began = Instant::now();
    for _ in 0..TURNS {
        drop(other.mutex("hot").lock().await.expect("its turn"));
    }
    println!("{TURNS} turns in {:?}", began.elapsed());
    assert!(load.stop().await > 0);
}
