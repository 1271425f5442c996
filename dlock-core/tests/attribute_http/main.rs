//! Annotated handlers of axum and actix-web under concurrent requests, each with two
//! services on one store. A history checks overlaps and tokens.

mod actix_service;
mod axum_service;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dlock::backend::memory::Memory;
use dlock::{Dlock, Guard};
use dlock_testkit::History;
use dlock_testkit::redis::RedisServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const REQUESTS: usize = 200;
const ORDERS: usize = 3;

/// The state that the handlers of a service share.
#[derive(Clone)]
struct App {
    dlock: Dlock,
    histories: Arc<[History; ORDERS]>,
}

impl App {
    /// The body of every handler.
    async fn book(&self, order: usize, lock: &Guard) -> String {
        let entry = self.histories[order].enter(lock);
        tokio::time::sleep(Duration::from_micros(200)).await;
        drop(entry);
        lock.token().to_string()
    }
}

/// Two services, as if in two processes, and another client.
struct Fixture {
    apps: [App; 2],
    other: Dlock,
    server: Option<RedisServer>,
}

impl Fixture {
    fn memory() -> Self {
        let store = Memory::new();
        Self::new(|| Dlock::builder().backend(store.another()), None)
    }

    fn redis() -> Option<Self> {
        let server = RedisServer::start()?;
        let url = server.url();
        Some(Self::new(|| Dlock::builder().url(&url), Some(server)))
    }

    fn new(builder: impl Fn() -> dlock::DlockBuilder, server: Option<RedisServer>) -> Self {
        let histories = Arc::new(std::array::from_fn(|_| History::default()));
        let client = || {
            let builder = builder().wait(Duration::from_secs(60));
            builder.ttl(Duration::from_secs(9)).connect_lazy().expect("a client")
        };
        let app = || App { dlock: client(), histories: Arc::clone(&histories) };
        Fixture { apps: [app(), app()], other: client(), server }
    }

    /// Sends many requests at once to both services.
    async fn storm(&self, services: [SocketAddr; 2]) {
        let mut requests = JoinSet::new();
        for number in 0..REQUESTS {
            let (service, order) = (services[number % 2], number % ORDERS);
            requests.spawn(async move { get(service, &format!("/orders/{order}")).await });
        }
        for reply in requests.join_all().await {
            assert_eq!(reply.status, 200, "{reply:?}");
            assert!(reply.body.parse::<u64>().is_ok(), "a token: {reply:?}");
        }
        for history in self.apps[0].histories.iter() {
            history.assert_clean();
        }
        let entries: u64 = self.apps[0].histories.iter().map(History::entries).sum();
        assert_eq!(entries, REQUESTS as u64);
    }

    /// Checks the HTTP status of each kind of error.
    async fn refusals(mut self, service: SocketAddr) {
        let busy = self.other.mutex("order:1").lock().await.expect("somebody else's lock");
        let reply = get(service, "/busy/1").await;
        assert_eq!((reply.status, reply.retry_after()), (409, None), "{reply:?}");
        drop(busy);

        let reply = get(service, &format!("/long/{}", "x".repeat(5_000))).await;
        assert_eq!(reply.status, 400, "{reply:?}");

        let stuck = tokio::spawn(get(service, "/stuck/2"));
        // A break may come before the handler knows that it has the lock. Then it asks again.
        let broken = async {
            while !stuck.is_finished() {
                self.other.break_lock("order:2").await.expect("an answer");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), broken).await.expect("its body is stopped");
        let reply = stuck.await.expect("a reply");
        assert_eq!((reply.status, reply.retry_after()), (500, None), "{reply:?}");

        if let Some(server) = &mut self.server {
            server.kill();
            let reply = get(service, "/busy/1").await;
            assert_eq!((reply.status, reply.retry_after()), (503, Some("1")), "{reply:?}");
        }
    }
}

#[derive(Debug)]
struct Reply {
    status: u16,
    headers: String,
    body: String,
}

impl Reply {
    fn retry_after(&self) -> Option<&str> {
        let header = |line: &'_ str| line.to_ascii_lowercase().starts_with("retry-after:");
        self.headers.lines().find(|line| header(line))?.split(": ").nth(1)
    }
}

/// Sends one request on its own connection.
async fn get(service: SocketAddr, path: &str) -> Reply {
    let mut stream = TcpStream::connect(service).await.expect("a connection");
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("a reply");
    let (headers, body) = text.split_once("\r\n\r\n").expect("headers and body");
    let status = headers.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.expect("a status");
    Reply { status, headers: headers.to_owned(), body: body.to_owned() }
}
