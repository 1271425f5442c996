//! Real ZooKeeper servers, started by the tests that need them: one, or an ensemble of
//! three.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::ports::free_port;
use crate::proxy::Proxy;
use crate::server_process::{Server, server};
use crate::session_servers::{Member, Members, SessionServer, wait_until_it_serves};

const JARS: [&str; 2] = ["/usr/share/java/zookeeper.jar", "/usr/share/zookeeper/zookeeper.jar"];
/// Sessions last two to twenty ticks.
const TICK_MILLIS: u32 = 200;
/// What a server tells in its report.
const COUNTS: [&str; 6] = [
    "zk_server_state",
    "zk_znode_count",
    "zk_ephemerals_count",
    "zk_global_sessions",
    "zk_synced_followers",
    "zk_outstanding_requests",
];
/// How many nodes an empty server has.
const OWN_NODES: u64 = 5;

/// A ZooKeeper server, or one member of an ensemble. It is killed when this value is
/// dropped.
#[derive(Debug)]
pub struct ZooKeeperServer(Server);

server!(ZooKeeperServer);

fn jar() -> Option<&'static str> {
    let jar = JARS.into_iter().find(|jar| Path::new(jar).exists());
    let java = std::process::Command::new("java").arg("-version").output().is_ok();
    let there = crate::servers::found("ZooKeeper", jar.is_some() && java);
    jar.filter(|_| there)
}

impl ZooKeeperServer {
    /// Starts a server; `None` if ZooKeeper is not installed, see
    /// [`servers::found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        let mut server = Self::prepared(jar()?, "", 0);
        server.0.launch();
        wait_until_it_serves(&server);
        Some(server)
    }

    fn prepared(jar: &str, members: &str, number: usize) -> Self {
        let mut server = Server::new("zookeeper");
        let config = format!(
            "tickTime={TICK_MILLIS}\ninitLimit=50\nsyncLimit=10\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\nmaxClientCnxns=0\n4lw.commands.whitelist=*\n{members}",
            server.path("data"),
            server.port,
        );
        std::fs::create_dir_all(server.path("data")).expect("a directory for the server");
        std::fs::write(server.path("data/myid"), number.to_string()).expect("the server's number");
        std::fs::write(server.path("zoo.cfg"), config).expect("the server's configuration");
        let main = "org.apache.zookeeper.server.quorum.QuorumPeerMain";
        // Few threads and no compiler of the second tier: the tests share the machine.
        let command = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"];
        server.command = command.map(str::to_owned).into();
        server.command.extend([jar.to_owned(), main.to_owned(), server.path("zoo.cfg")]);
        ZooKeeperServer(server)
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        Self::url_at(&[self.port()])
    }

    /// The answer of the server to a command of four letters.
    pub fn command(&self, command: &str) -> String {
        let mut answer = String::new();
        let mut asked = || -> std::io::Result<()> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.0.port))?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            stream.write_all(command.as_bytes())?;
            stream.read_to_string(&mut answer)?;
            Ok(())
        };
        let _ = asked();
        answer
    }

    /// The ids of the sessions that have ephemeral nodes.
    fn owners_of_nodes(&self) -> Vec<String> {
        let dump = self.command("dump");
        let ids = dump.lines().filter_map(|line| line.trim().strip_suffix(':'));
        ids.filter(|id| id.starts_with("0x")).map(str::to_owned).collect()
    }

    /// The paths of all ephemeral nodes.
    pub fn ephemeral_nodes(&self) -> Vec<String> {
        let dump = self.command("dump");
        let lines = dump.lines().map(str::trim);
        lines.filter(|line| line.starts_with('/')).map(str::to_owned).collect()
    }

    /// Deletes a node, as an administrator may do.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn delete(&self, path: &str) {
        let length = i32::try_from(path.len()).expect("a short path");
        let mut request = [1_i32, 2, length].map(i32::to_be_bytes).concat();
        request.extend(path.as_bytes());
        request.extend((-1_i32).to_be_bytes()); // whatever its version
        send_in_session(self.0.port, 0, request).expect("an answer of ZooKeeper");
    }

    /// How many sessions there are that have ephemeral nodes.
    pub fn sessions_with_nodes(&self) -> usize {
        self.owners_of_nodes().len()
    }

    /// How many nodes there are beside those of ZooKeeper itself. An empty parent is removed
    /// by the server, after a minute unless it is told otherwise.
    pub fn nodes(&self) -> Option<u64> {
        self.told("zk_znode_count").map(|count| count.saturating_sub(OWN_NODES))
    }

    /// A number that the server tells about itself.
    fn told(&self, name: &str) -> Option<u64> {
        let told = self.command("mntr");
        let mut values = told.lines().filter_map(|line| line.split_once('\t'));
        values.find(|(it, _)| *it == name)?.1.trim().parse().ok()
    }
}

impl SessionServer for ZooKeeperServer {
    const SCHEME: &'static str = "zookeeper";
    // The longest that the servers of tests accept: twenty ticks.
    const LONG_TTL: Duration = Duration::from_secs(4);
    const FREED_WITHIN: Duration = Duration::from_secs(5);
    const PROGRESS_WITHIN: Duration = Duration::from_secs(4);

    fn start() -> Option<Self> {
        Self::start()
    }

    /// To its client this looks like an expiry.
    fn end_sessions(&self) {
        let began = Instant::now();
        let ids = self.owners_of_nodes();
        loop {
            let left = self.owners_of_nodes();
            let left: Vec<_> = ids.iter().filter(|id| left.contains(id)).collect();
            if left.is_empty() {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "{left:?} are still there");
            for id in left {
                let id = i64::from_str_radix(id.trim_start_matches("0x"), 16).expect("an id");
                let _ = close_session(self.0.port, id);
            }
        }
    }

    /// Only the leader knows all sessions.
    fn left(&self) -> Vec<String> {
        let is_left = |name: &&str| self.told(name) != Some(0);
        match ["zk_global_sessions", "zk_ephemerals_count"].iter().any(is_left) {
            true => self.command("dump").lines().map(str::to_owned).collect(),
            false => Vec::new(),
        }
    }

    /// A node whose owner is in no list of sessions was left by the server and not by a
    /// client.
    fn report(&self) -> String {
        let is_told = |line: &&str| COUNTS.iter().any(|name| line.starts_with(name));
        let (told, dump) = (self.command("mntr"), self.command("dump"));
        let told: Vec<_> = told.lines().filter(is_told).collect();
        format!("server at {}:\n{}\n{dump}", self.0.port, told.join("\n"))
    }
}

impl Member for ZooKeeperServer {
    fn serves(&self) -> bool {
        self.command("srvr").contains("Mode: ")
    }

    /// A leader that was stopped takes itself for one until it hears that nobody follows it.
    fn leads(&self) -> bool {
        self.told("zk_synced_followers").is_some_and(|followers| followers > 0)
    }
}

/// An ensemble of three ZooKeeper servers.
pub type ZooKeeperEnsemble = Members<ZooKeeperServer>;

impl ZooKeeperEnsemble {
    /// Starts an ensemble; `None` if ZooKeeper is not installed.
    ///
    /// # Panics
    /// If it has no leader within a minute.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts an ensemble with these options of Java.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with(options: &[&str]) -> Option<Self> {
        let jar = jar()?;
        let ports: Vec<_> = (0..3).map(|_| [free_port(), free_port()]).collect();
        let members = members_at(&ports);
        let member = |number| {
            let mut server = ZooKeeperServer::prepared(jar, &members, number);
            let options = options.iter().map(|option| (*option).to_owned());
            server.0.command.splice(1..1, options);
            server
        };
        Some(Self::launched((1..=3).map(member).collect()))
    }

    /// Starts an ensemble whose third member can be cut off from the others by these
    /// proxies. It is not the leader; `None` if ZooKeeper is not installed.
    ///
    /// # Panics
    /// If it has no leader within a minute, or outside a runtime.
    pub fn start_with_link() -> Option<(Self, Vec<Proxy>)> {
        let jar = jar()?;
        let ports: Vec<_> = (0..3).map(|_| [free_port(), free_port()]).collect();
        let members = members_at(&ports);
        let member = |number| ZooKeeperServer::prepared(jar, &members, number);
        let mut ensemble = Self::launched((1..=2).map(member).collect());
        // The third connects to the others through proxies, since its number is the highest.
        let mut proxies = Vec::new();
        let mut through = |port: u16| {
            proxies.push(Proxy::opaque(port));
            proxies[proxies.len() - 1].port()
        };
        let seen = [ports[0].map(&mut through), ports[1].map(&mut through), ports[2]];
        let mut third = ZooKeeperServer::prepared(jar, &members_at(&seen), 3);
        tokio::task::block_in_place(|| {
            third.0.launch();
            wait_until_it_serves(&third);
        });
        ensemble.servers.push(third);
        Some((ensemble, proxies))
    }
}

/// The lines of the configuration that name the members.
fn members_at(ports: &[[u16; 2]]) -> String {
    let line = |(at, [quorum, election]): (usize, &[u16; 2])| {
        format!("server.{}=127.0.0.1:{quorum}:{election}\n", at + 1)
    };
    ports.iter().enumerate().map(line).collect()
}

/// Asks the server at this port to close a session. The session's password is derived from
/// its id, and whoever knows both may close it. Its own client may be faster and connect
/// again, so there is no answer to rely on.
fn close_session(port: u16, id: i64) -> std::io::Result<()> {
    send_in_session(port, id, Vec::new())
}

/// Sends a request in a session, closes the session and waits for that. A session with the id
/// zero is a new one.
fn send_in_session(port: u16, id: i64, request: Vec<u8>) -> std::io::Result<()> {
    let mut connect = Vec::new();
    connect.extend(0_i32.to_be_bytes()); // protocol
    connect.extend(0_i64.to_be_bytes()); // last transaction seen
    connect.extend(2_000_i32.to_be_bytes()); // time-out
    connect.extend(id.to_be_bytes());
    connect.extend(16_i32.to_be_bytes());
    connect.extend(password_of(id));
    connect.push(0); // may write
    let close = [1_i32, -11].map(i32::to_be_bytes).concat();
    let mut frames = Vec::new();
    for frame in [connect, request, close].into_iter().filter(|frame| !frame.is_empty()) {
        frames.extend(u32::try_from(frame.len()).unwrap_or(0).to_be_bytes());
        frames.extend(frame);
    }
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(&frames)?;
    stream.read_to_end(&mut Vec::new()).map(drop)
}

/// What `java.util.Random` gives for the seed that ZooKeeper makes from the id.
fn password_of(id: i64) -> [u8; 16] {
    const MULTIPLIER: u64 = 0x5_DEEC_E66D;
    const MASK: u64 = (1 << 48) - 1;
    let mut seed = (id.cast_unsigned() ^ 0xB341_5C00 ^ MULTIPLIER) & MASK;
    let mut password = [0; 16];
    for four in password.chunks_mut(4) {
        seed = (seed.wrapping_mul(MULTIPLIER) + 0xB) & MASK;
        let bytes = u32::try_from(seed >> 16).unwrap_or(0).to_le_bytes();
        four.copy_from_slice(&bytes);
    }
    password
}
