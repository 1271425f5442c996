//! Real ZooKeeper servers, started by the tests that need them: one, or an ensemble of
//! three.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::database_servers::{Server, free_port};
use crate::proxy::Proxy;

const JARS: [&str; 2] = ["/usr/share/java/zookeeper.jar", "/usr/share/zookeeper/zookeeper.jar"];
/// Sessions last two to twenty ticks.
const TICK_MILLIS: u32 = 200;
/// How long an ensemble may take to have a leader.
const ELECTION: Duration = Duration::from_secs(60);

/// A ZooKeeper server, or one member of an ensemble. It is killed when this value is
/// dropped.
#[derive(Debug)]
pub struct ZooKeeperServer(Server);

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
        eventually_serves(std::slice::from_ref(&server));
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
        format!("zookeeper://127.0.0.1:{}", self.0.port)
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

    /// Whether the server is the leader of its ensemble, or alone.
    pub fn is_leader(&self) -> bool {
        let state = self.command("srvr");
        state.contains("Mode: leader") || state.contains("Mode: standalone")
    }

    fn serves(&self) -> bool {
        self.command("srvr").contains("Mode: ")
    }

    /// The ids of the sessions that have ephemeral nodes.
    fn owners_of_nodes(&self) -> Vec<String> {
        let dump = self.command("dump");
        let ids = dump.lines().filter_map(|line| line.trim().strip_suffix(':'));
        ids.filter(|id| id.starts_with("0x")).map(str::to_owned).collect()
    }

    /// How many sessions there are that have ephemeral nodes.
    pub fn sessions_with_nodes(&self) -> usize {
        self.owners_of_nodes().len()
    }

    /// Ends all sessions that have ephemeral nodes, as an administrator's tool does. To its
    /// client this looks like an expiry.
    ///
    /// # Panics
    /// If a session is there after ten seconds.
    pub fn end_sessions(&self) {
        let began = Instant::now();
        loop {
            let ids = self.owners_of_nodes();
            if ids.is_empty() {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "{ids:?} are still there");
            for id in ids {
                let id = i64::from_str_radix(id.trim_start_matches("0x"), 16).expect("an id");
                let _ = close_session(self.0.port, id);
            }
        }
    }
}

fn eventually_serves(servers: &[ZooKeeperServer]) {
    let began = Instant::now();
    while !servers.iter().all(ZooKeeperServer::serves) {
        assert!(began.elapsed() < ELECTION, "ZooKeeper does not serve");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// An ensemble of three ZooKeeper servers.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    /// The members.
    pub servers: Vec<ZooKeeperServer>,
}

impl ZooKeeperEnsemble {
    /// Starts an ensemble; `None` if ZooKeeper is not installed.
    ///
    /// # Panics
    /// If it has no leader within a minute.
    pub fn start() -> Option<Self> {
        let jar = jar()?;
        let member =
            |number: usize| format!("server.{number}=127.0.0.1:{}:{}\n", free_port(), free_port());
        let members: String = (1..=3).map(member).collect();
        let mut servers: Vec<_> =
            (1..=3).map(|number| ZooKeeperServer::prepared(jar, &members, number)).collect();
        servers.iter_mut().for_each(|server| server.0.launch());
        eventually_serves(&servers);
        Some(ZooKeeperEnsemble { servers })
    }

    /// Starts an ensemble whose third member can be cut off from the others by these
    /// proxies. It is not the leader; `None` if ZooKeeper is not installed.
    ///
    /// # Panics
    /// If it has no leader within a minute, or outside a runtime.
    pub fn start_with_link() -> Option<(Self, Vec<Proxy>)> {
        let jar = jar()?;
        let ports: Vec<[u16; 2]> = (0..3).map(|_| [free_port(), free_port()]).collect();
        let line = |number: usize, [quorum, election]: [u16; 2]| {
            format!("server.{number}=127.0.0.1:{quorum}:{election}\n")
        };
        let members: String = (1..=3).map(|number| line(number, ports[number - 1])).collect();
        let mut servers: Vec<_> =
            (1..=2).map(|number| ZooKeeperServer::prepared(jar, &members, number)).collect();
        servers.iter_mut().for_each(|server| server.0.launch());
        eventually_serves(&servers);
        // The third connects to the others through proxies, since its number is the highest.
        let mut proxies = Vec::new();
        let mut through = |port: u16| {
            proxies.push(Proxy::opaque(port));
            proxies[proxies.len() - 1].port()
        };
        let seen = [ports[0].map(&mut through), ports[1].map(&mut through), ports[2]];
        let members: String = (1..=3).map(|number| line(number, seen[number - 1])).collect();
        let mut third = ZooKeeperServer::prepared(jar, &members, 3);
        tokio::task::block_in_place(|| {
            third.0.launch();
            eventually_serves(std::slice::from_ref(&third));
        });
        servers.push(third);
        Some((ZooKeeperEnsemble { servers }, proxies))
    }

    /// The URL of the ensemble.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("zookeeper://{}", hosts.join(","))
    }

    /// The number of the leader in [`servers`](Self::servers).
    ///
    /// # Panics
    /// If there is none within a minute.
    pub fn leader(&self) -> usize {
        let began = Instant::now();
        loop {
            if let Some(leader) = self.servers.iter().position(ZooKeeperServer::is_leader) {
                return leader;
            }
            assert!(began.elapsed() < ELECTION, "the ensemble has no leader");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Asks the server at this port to close a session. The session's password is derived from
/// its id, and whoever knows both may close it. Its own client may be faster and connect
/// again, so there is no answer to rely on.
fn close_session(port: u16, id: i64) -> std::io::Result<()> {
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
    for frame in [connect, close] {
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
