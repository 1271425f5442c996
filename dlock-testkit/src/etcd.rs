//! Real etcd servers, started by the tests that need them: one, or a cluster of three.
//! `scripts/build-etcd` builds the program with Go.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::database_servers::{Server, free_port};

/// How long a cluster may take to have a leader.
const ELECTION: Duration = Duration::from_secs(60);
/// Elections are quicker than by default, and so leases may be shorter.
const HEARTBEAT_MILLIS: u32 = 50;
const ELECTION_MILLIS: u32 = 500;

/// An etcd server, or one member of a cluster. It is killed when this value is dropped.
#[derive(Debug)]
pub struct EtcdServer(Server);

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
        let peer = free_port();
        let cluster = format!("m1=http://127.0.0.1:{peer}");
        let mut server = Self::prepared(&program()?, "m1", peer, &cluster);
        server.0.command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        server.0.launch();
        eventually_serves(std::slice::from_ref(&server));
        Some(server)
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
        format!("etcd://127.0.0.1:{}", self.0.port)
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.0.port
    }

    /// Kills the server with SIGKILL. Its files stay.
    pub fn kill(&mut self) {
        self.0.kill();
    }

    /// Kills the server, and starts it again with its files on the same port.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart(&mut self) {
        self.0.kill();
        self.0.launch();
    }

    /// The answer of the server's JSON interface; nothing if there is none.
    pub fn ask(&self, path: &str, body: &serde_json::Value) -> serde_json::Value {
        let asked = || -> std::io::Result<serde_json::Value> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.0.port))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            let body = body.to_string();
            write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
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

    /// Whether the server is the leader of its cluster.
    pub fn is_leader(&self) -> bool {
        let status = self.status();
        status["leader"].is_string() && status["leader"] == status["header"]["member_id"]
    }

    fn serves(&self) -> bool {
        self.status()["leader"].is_string()
    }

    /// The ids of all leases.
    pub fn leases(&self) -> Vec<String> {
        let answer = self.ask("/v3/lease/leases", &serde_json::json!({}));
        let leases = answer["leases"].as_array().cloned().unwrap_or_default();
        leases.iter().filter_map(|lease| Some(lease["ID"].as_str()?.to_owned())).collect()
    }

    /// Revokes all leases, as an administrator may do.
    pub fn revoke_leases(&self) {
        for lease in self.leases() {
            self.ask("/v3/lease/revoke", &serde_json::json!({ "ID": lease }));
        }
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        // All keys: from the byte zero on. Both are in Base64.
        let all = serde_json::json!({ "key": "AA==", "range_end": "AA==", "count_only": true });
        let count = self.ask("/v3/kv/range", &all);
        count["count"].as_str().and_then(|count| count.parse().ok()).unwrap_or(0)
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

fn eventually_serves(servers: &[EtcdServer]) {
    let began = Instant::now();
    while !servers.iter().all(EtcdServer::serves) {
        assert!(began.elapsed() < ELECTION, "etcd does not serve");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A cluster of three etcd servers.
#[derive(Debug)]
pub struct EtcdCluster {
    /// The members.
    pub servers: Vec<EtcdServer>,
}

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
        let mut servers: Vec<EtcdServer> = (0..3).map(server).collect();
        // A member accepts connections only when the cluster has a leader.
        std::thread::scope(|scope| {
            for server in &mut servers {
                scope.spawn(|| server.0.launch());
            }
        });
        eventually_serves(&servers);
        Some(EtcdCluster { servers })
    }

    /// The URL of the cluster.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("etcd://{}", hosts.join(","))
    }

    /// The number of the leader in [`servers`](Self::servers).
    ///
    /// # Panics
    /// If there is none within a minute.
    pub fn leader(&self) -> usize {
        let began = Instant::now();
        loop {
            if let Some(leader) = self.servers.iter().position(EtcdServer::is_leader) {
                return leader;
            }
            assert!(began.elapsed() < ELECTION, "the cluster has no leader");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
