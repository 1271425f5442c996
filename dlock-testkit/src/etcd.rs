//! Real etcd servers, started by the tests that need them: one, or a cluster of three.
//! `scripts/build-etcd` builds the program with Go.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::ports::free_port;
use crate::server_process::{Server, server};
use crate::session_servers::{Member, Members, SessionServer, wait_until_it_serves};

/// Elections are quicker than by default, and so leases may be shorter.
const HEARTBEAT_MILLIS: u32 = 50;
const ELECTION_MILLIS: u32 = 500;

/// An etcd server, or one member of a cluster. It is killed when this value is dropped.
#[derive(Debug)]
pub struct EtcdServer(Server);

server!(EtcdServer);

fn program() -> Option<PathBuf> {
    let program = crate::servers::cache().join("etcd-3.6");
    crate::servers::found("etcd", program.is_file()).then_some(program)
}

impl EtcdServer {
    /// Starts a server; `None` if etcd was not built, see
    /// [`servers::found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts a server with these further arguments.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with(arguments: &[&str]) -> Option<Self> {
        Some(Self::alone()?.launched(arguments))
    }

    /// Starts a server with these further arguments that is also reached by TLS, at the port
    /// that is answered.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with_tls(arguments: &[&str]) -> Option<(Self, u16)> {
        let (server, port) = (Self::alone()?, free_port());
        let plain = url(server.0.port);
        let both = format!("--listen-client-urls={plain},https://127.0.0.1:{port}");
        Some((server.launched(&[&[both.as_str()], arguments].concat()), port))
    }

    fn alone() -> Option<Self> {
        let peer = free_port();
        Some(Self::prepared(&program()?, "m1", peer, &format!("m1={}", url(peer))))
    }

    fn launched(mut self, arguments: &[&str]) -> Self {
        self.0.command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self.0.launch();
        wait_until_it_serves(&self);
        self
    }

    fn prepared(program: &std::path::Path, name: &str, peer: u16, cluster: &str) -> Self {
        let mut server = Server::new("etcd");
        let (client, peer) = (url(server.port), url(peer));
        let arguments = [
            ("name", name),
            ("data-dir", &server.path("data")),
            ("listen-client-urls", &client),
            ("advertise-client-urls", &client),
            ("listen-peer-urls", &peer),
            ("initial-advertise-peer-urls", &peer),
            ("initial-cluster", cluster),
            ("heartbeat-interval", &HEARTBEAT_MILLIS.to_string()),
            ("election-timeout", &ELECTION_MILLIS.to_string()),
            ("log-level", "error"),
            // The tests share a disk, and no test takes the power away.
            ("unsafe-no-fsync", "true"),
        ];
        let arguments: Vec<String> =
            arguments.iter().map(|(name, value)| format!("--{name}={value}")).collect();
        server.command = vec![program.to_str().expect("a path").to_owned()];
        server.command.extend(arguments);
        EtcdServer(server)
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        Self::url_at(&[self.port()])
    }

    /// The answer of the server's JSON interface; nothing if there is none.
    pub fn ask(&self, path: &str, body: &serde_json::Value) -> serde_json::Value {
        self.ask_as("", path, body)
    }

    /// The same for a user that has logged in and got this token.
    pub fn ask_as(&self, token: &str, path: &str, body: &serde_json::Value) -> serde_json::Value {
        let asked = || -> std::io::Result<serde_json::Value> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.0.port))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            let body = body.to_string();
            let length = body.len();
            write!(
                stream,
                "POST {path} HTTP/1.0\r\nAuthorization: {token}\r\nContent-Length: {length}\r\n\r\n{body}"
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
            Ok(serde_json::from_str(body)?)
        };
        asked().unwrap_or_default()
    }

    fn status(&self) -> serde_json::Value {
        self.ask("/v3/maintenance/status", &serde_json::json!({}))
    }

    /// The ids of all leases.
    pub fn leases(&self) -> Vec<String> {
        let answer = self.ask("/v3/lease/leases", &serde_json::json!({}));
        let leases = answer["leases"].as_array().cloned().unwrap_or_default();
        leases.iter().filter_map(|lease| Some(lease["ID"].as_str()?.to_owned())).collect()
    }

    /// The names of all keys.
    pub fn keys(&self) -> Vec<String> {
        self.keys_at(0)
    }

    /// The names of all keys as of a revision; of the present one if it is zero.
    pub fn keys_at(&self, revision: u64) -> Vec<String> {
        // All keys: from the byte zero on. Both are in Base64.
        let all = serde_json::json!({
            "key": "AA==",
            "range_end": "AA==",
            "keys_only": true,
            "revision": revision.to_string(),
        });
        let found = self.ask("/v3/kv/range", &all);
        let found = found["kvs"].as_array().cloned().unwrap_or_default();
        found.iter().filter_map(|entry| decoded(entry["key"].as_str()?)).collect()
    }

    /// The revision of the store: every change makes another one.
    pub fn revision(&self) -> u64 {
        let status = self.status();
        status["header"]["revision"].as_str().and_then(|it| it.parse().ok()).unwrap_or(0)
    }

    /// Compacts the history up to the present.
    pub fn compact(&self) {
        let revision = self.revision().to_string();
        self.ask("/v3/kv/compaction", &serde_json::json!({ "revision": revision }));
    }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// The string that is written in Base64.
fn decoded(base64: &str) -> Option<String> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in base64.trim_end_matches('=').bytes() {
        let value = DIGITS.iter().position(|it| *it == digit)?;
        bits = (bits << 6) | u32::try_from(value).ok()?;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from((bits >> count) & 0xFF).ok()?);
        }
    }
    String::from_utf8(bytes).ok()
}

impl SessionServer for EtcdServer {
    const SCHEME: &'static str = "etcd";
    const LONG_TTL: Duration = Duration::from_secs(20);
    const FREED_WITHIN: Duration = Duration::from_secs(10);
    const PROGRESS_WITHIN: Duration = Duration::from_secs(10);

    fn start() -> Option<Self> {
        Self::start()
    }

    fn end_sessions(&self) {
        let began = Instant::now();
        let leases = self.leases();
        while self.leases().iter().any(|lease| leases.contains(lease)) {
            assert!(began.elapsed() < Duration::from_secs(10), "{leases:?} are still there");
            for lease in &leases {
                self.ask("/v3/lease/revoke", &serde_json::json!({ "ID": lease }));
            }
        }
    }

    /// The record of a broken lock has a lease of its own.
    fn left(&self) -> Vec<String> {
        assert!(self.serves(), "etcd does not answer");
        let (records, mut left): (Vec<_>, Vec<_>) =
            self.keys().into_iter().partition(|key| key.contains(";dlock/broken/"));
        left.extend(self.leases().into_iter().skip(records.len()));
        left
    }
}

impl Member for EtcdServer {
    fn serves(&self) -> bool {
        self.status()["leader"].is_string()
    }

    fn leads(&self) -> bool {
        let status = self.status();
        status["leader"].is_string() && status["leader"] == status["header"]["member_id"]
    }
}

/// A cluster of three etcd servers.
pub type EtcdCluster = Members<EtcdServer>;

impl EtcdCluster {
    /// Starts a cluster; `None` if etcd was not built.
    ///
    /// # Panics
    /// If it has no leader within a minute.
    pub fn start() -> Option<Self> {
        let program = program()?;
        let peers: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let member = |(at, port): (usize, &u16)| format!("m{at}={}", url(*port));
        let cluster: Vec<String> = peers.iter().enumerate().map(member).collect();
        let cluster = cluster.join(",");
        let server =
            |at: usize| EtcdServer::prepared(&program, &format!("m{at}"), peers[at], &cluster);
        Some(Self::launched((0..3).map(server).collect()))
    }
}
