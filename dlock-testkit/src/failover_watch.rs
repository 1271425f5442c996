//! Watches for failovers, wanted or not: a busy machine may cause one by itself.
//!
//! A checker must know of each, since guards may overlap across a failover. When the old
//! primary lives, clients that have left it and clients that have not yet are granted the
//! same locks for some milliseconds. With Sentinels a server is promoted when the first of
//! them names it, and in a cluster when a replica calls itself a primary.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::process::now;
use crate::resp;
use crate::topology::{ClusterServers, MASTER_NAME, SentinelServers};

/// The pause between two questions to the same server.
const PAUSE: Duration = Duration::from_millis(20);

/// What is asked, and on which line the answer is.
#[derive(Clone)]
struct Question {
    command: String,
    line: usize,
    /// Whether a new answer means a promotion.
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    /// The address of the primary, and the one that was named last by anybody.
    Address(Arc<Mutex<String>>),
    /// The role of the server that was asked.
    Role,
}

impl Kind {
    fn is_promotion(&self, answer: &str) -> bool {
        match self {
            Kind::Role => answer == "master",
            Kind::Address(named) => {
                let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
                let is_new = *named != answer;
                answer.clone_into(&mut named);
                is_new
            }
        }
    }
}

/// Called at each failover, with a moment at which the old primary was the only one, and
/// with that of the promotion.
pub type OnFailover = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Servers whose failovers can be watched.
pub trait FailsOver {
    /// Watches for as long as the tasks live.
    fn watch(&self, on_failover: OnFailover) -> JoinSet<()>;
}

impl FailsOver for SentinelServers {
    fn watch(&self, on_failover: OnFailover) -> JoinSet<()> {
        let ports = self.sentinels.iter().map(|sentinel| sentinel.port()).collect();
        let command = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {MASTER_NAME}\r\n");
        let kind = Kind::Address(Arc::default());
        watch(ports, &Question { command, line: 4, kind }, &on_failover)
    }
}

impl FailsOver for ClusterServers {
    fn watch(&self, on_failover: OnFailover) -> JoinSet<()> {
        let ports = self.nodes.iter().map(|node| node.port()).collect();
        let question = Question { command: "ROLE\r\n".into(), line: 2, kind: Kind::Role };
        watch(ports, &question, &on_failover)
    }
}

fn watch(ports: Vec<u16>, question: &Question, on_failover: &OnFailover) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for port in ports {
        let (question, on_failover) = (question.clone(), on_failover.clone());
        tasks.spawn(async move {
            let mut last: Option<(String, u64)> = None;
            loop {
                // A server that is down is asked again when it is back.
                let _ = ask_on(port, &question, &mut last, &on_failover).await;
                tokio::time::sleep(PAUSE).await;
            }
        });
    }
    tasks
}

/// Asks over one connection until it breaks.
async fn ask_on(
    port: u16,
    question: &Question,
    last: &mut Option<(String, u64)>,
    on_failover: &OnFailover,
) -> std::io::Result<()> {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut bytes = Vec::new();
    loop {
        let asked = now();
        connection.write_all(question.command.as_bytes()).await?;
        bytes.clear();
        while !matches!(resp::length(&bytes), Ok(Some(_))) {
            if connection.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        }
        let answer = String::from_utf8_lossy(&bytes);
        let answer = answer.lines().nth(question.line).unwrap_or_default().to_owned();
        match last {
            Some((known, at)) if *known != answer => {
                if question.kind.is_promotion(&answer) {
                    on_failover(*at, now());
                }
            }
            Some(_) => {}
            None => {
                question.kind.is_promotion(&answer); // it has been one before
            }
        }
        *last = Some((answer, asked));
        tokio::time::sleep(PAUSE).await;
    }
}
