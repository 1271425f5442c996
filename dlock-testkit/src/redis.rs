//! Real Redis servers, started by the tests that need them.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::backend::redis::Redis;
use dlock::{Dlock, DlockBuilder};

use crate::ports::free_port;

/// A `redis-server` process on a free loopback port, without persistence. It is
/// killed when this value is dropped.
#[derive(Debug)]
pub struct RedisServer {
    program: String,
    process: Option<Child>,
    paused: AtomicBool,
    port: u16,
    directory: PathBuf,
    options: Vec<String>,
    environment: Vec<(String, String)>,
    /// Read before the options; a Sentinel keeps its state in it.
    config_file: Option<PathBuf>,
}

/// The ttl of [`client`]: long enough for a slow machine, and short enough for tests
/// that wait for its end.
pub const TTL: Duration = Duration::from_millis(900);

/// A builder of a client for the server at this URL, with the options of most tests.
pub fn client(url: &str) -> DlockBuilder {
    Dlock::builder().url(url).namespace("test").ttl(TTL).wait(Duration::from_secs(20))
}

impl RedisServer {
    /// Starts a server; `None` if `redis-server` is not installed, see
    /// [`found`](crate::servers::found).
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// Starts a server with more options, written as on its command line.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with(options: &[&str]) -> Option<Self> {
        let program = "redis-server";
        crate::servers::found(program, runs(program)).then(|| Self::of(program, options, None))
    }

    /// Starts a server that reads these lines as its configuration file, which it may
    /// rewrite.
    ///
    /// # Panics
    /// If the server does not start.
    pub(crate) fn configured(lines: &str, options: &[&str]) -> Option<Self> {
        let program = "redis-server";
        let is_there = crate::servers::found(program, runs(program));
        is_there.then(|| Self::of(program, options, Some(lines)))
    }

    fn of(program: &str, options: &[&str], lines: Option<&str>) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("dlock-redis-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).expect("a directory for the server");
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let config_file = lines.map(|lines| {
            let file = directory.join("configuration");
            std::fs::write(&file, lines).expect("the server's configuration");
            file
        });
        let mut server = RedisServer {
            program: program.to_owned(),
            process: None,
            paused: AtomicBool::new(false),
            port: free_port(),
            directory,
            options,
            environment: Vec::new(),
            config_file,
        };
        // Somebody else may have taken the port meanwhile.
        let launched = (0..3).any(|_| {
            let launched = server.launch();
            if !launched {
                server.port = free_port();
            }
            launched
        });
        assert!(launched, "{program} does not start");
        server
    }

    fn launch(&mut self) -> bool {
        let log = self.directory.join("log");
        let process = Command::new(&self.program)
            .args(&self.config_file)
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .arg("--dir")
            .arg(&self.directory)
            .arg("--logfile")
            .arg(&log)
            .arg("--unixsocket")
            .arg(self.socket())
            .args(&self.options)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server can be run");
        self.process = Some(process);
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            let gone = self.process.as_mut().is_some_and(|it| !matches!(it.try_wait(), Ok(None)));
            if gone {
                return false;
            }
            // Its own socket shows that it is this server that listens on the port.
            let is_this = self.socket().exists();
            if is_this && TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// Kills the server with SIGKILL: it loses what it had in memory.
    pub fn kill(&mut self) {
        self.paused.store(false, Ordering::Relaxed);
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Restarts the server on the same port.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart(&mut self) {
        self.kill();
        let began = Instant::now();
        while !self.launch() {
            assert!(began.elapsed() < Duration::from_secs(20), "redis-server does not restart");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Restarts the server with more options.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart_with(&mut self, options: &[&str]) {
        self.add_options(options);
        self.restart();
    }

    /// Adds options for the next restart.
    pub(crate) fn add_options(&mut self, options: &[&str]) {
        self.options.extend(options.iter().map(|&option| option.to_owned()));
    }

    /// Whether the server was started, and neither killed nor paused since.
    pub fn answers(&self) -> bool {
        self.is_running() && !self.paused.load(Ordering::Relaxed)
    }

    /// Whether the server was started and not killed since.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Restarts the server with more environment variables.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart_in(&mut self, environment: &[(&str, &str)]) {
        let pairs = environment.iter();
        self.environment.extend(pairs.map(|&(name, value)| (name.to_owned(), value.to_owned())));
        self.restart();
    }

    /// A client of this server, not connected yet.
    ///
    /// # Panics
    /// Never: the URL is right.
    pub fn client(&self) -> Dlock {
        client(&self.url()).connect_lazy().expect("a client")
    }

    /// Pauses the server with SIGSTOP: it keeps its connections and answers nothing.
    pub fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
        self.process.iter().for_each(|process| crate::process::pause(process.id()));
    }

    /// Resumes the server.
    pub fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
        self.process.iter().for_each(|process| crate::process::resume(process.id()));
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The working directory of the server.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The path of the server's Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// A backend on this server, for one client.
    ///
    /// # Panics
    /// Never: the URL is right.
    pub fn backend(&self) -> Redis {
        Redis::new(&self.url(), "test").expect("a URL")
    }

    /// Runs `redis-cli` with these arguments and returns what it prints.
    ///
    /// # Panics
    /// If it cannot be run.
    pub fn cli(&self, arguments: &[&str]) -> String {
        let output = self.cli_command().args(arguments).output();
        let output = output.expect("redis-cli comes with redis-server");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// The keys in the server, without the marker of a layout, which stays for ever.
    ///
    /// # Panics
    /// If `redis-cli` cannot be run.
    pub fn keys(&self) -> Vec<String> {
        let keys = self.cli(&["--raw", "KEYS", "*"]);
        keys.lines().filter(|key| !key.is_empty() && !is_layout(key)).map(str::to_owned).collect()
    }

    /// Runs `redis-cli` with many commands and returns what it prints, in lines.
    ///
    /// # Panics
    /// If it cannot be run.
    pub fn cli_all(&self, commands: &[String]) -> Vec<String> {
        use std::io::Write as _;
        let mut cli = self.cli_command();
        let mut cli = cli.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("redis-cli");
        let mut input = cli.stdin.take().expect("its input");
        let lines = commands.join("\n") + "\n";
        // It may print before it has read everything.
        let writing = std::thread::spawn(move || input.write_all(lines.as_bytes()));
        let output = cli.wait_with_output().expect("redis-cli ends");
        let _ = writing.join();
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
    }

    fn cli_command(&self) -> Command {
        let password = self.options.iter().skip_while(|option| *option != "--requirepass").nth(1);
        let mut cli = Command::new("redis-cli");
        cli.arg("-s").arg(self.socket());
        cli.args(password.iter().flat_map(|password| ["--no-auth-warning", "-a", password]));
        cli
    }
}

const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// The wall clock of a server, which a test sets with libfaketime.
#[derive(Debug)]
pub struct Clock {
    file: PathBuf,
}

impl Clock {
    /// Starts a server with such a clock; `None` if `redis-server` or libfaketime is not
    /// installed, see
    /// [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn of_a_server() -> Option<(RedisServer, Clock)> {
        if !crate::servers::found("libfaketime", Path::new(FAKETIME).exists()) {
            return None;
        }
        let mut server = RedisServer::start()?;
        let clock = Clock { file: server.directory().join("clock") };
        clock.ahead(Duration::ZERO);
        server.restart_in(&[
            // The allocator that Redis comes with asks for the time too early.
            ("LD_PRELOAD", &format!("{FAKETIME} libc.so.6")),
            ("FAKETIME_TIMESTAMP_FILE", clock.file.to_str().expect("a path")),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ]);
        Some((server, clock))
    }

    /// Sets the clock this much ahead of the real time.
    ///
    /// # Panics
    /// If the clock cannot be set.
    pub fn ahead(&self, by: Duration) {
        std::fs::write(&self.file, format!("+{}", by.as_secs())).expect("the clock is set");
    }
}

/// Whether a key is the marker that says in which layout a namespace is kept.
fn is_layout(key: &str) -> bool {
    key.starts_with("dlock:layout:")
}

/// The keys, connections and channels of clients that are left at a server. The name
/// of who broke a lock is kept for an hour and is not counted; nor are other servers that
/// are connected to this one.
fn left(server: &RedisServer) -> Vec<String> {
    let keyspace = server.cli(&["INFO", "keyspace"]);
    let databases = keyspace.lines().filter_map(|line| line.strip_prefix("db")?.split(':').next());
    let keys: String =
        databases.map(|database| server.cli(&["-n", database, "--scan"]) + "\n").collect();
    let clients = server.cli(&["CLIENT", "LIST"]);
    let channels = server.cli(&["PUBSUB", "CHANNELS"]);
    // Who broke a lock is kept for an hour, and the markers of a node and of a layout for ever.
    let is_kept = |key: &&str| key.is_empty() || key.ends_with("}:b") || key.ends_with("}:v");
    let keys = keys.lines().filter(|key| !is_kept(key) && !is_layout(key));
    let servers = ["cmd=client", " name=sentinel-", " flags=S ", " flags=M "];
    let clients = clients.lines().filter(|client| !servers.iter().any(|it| client.contains(it)));
    let sharded = server.cli(&["PUBSUB", "SHARDCHANNELS"]);
    let sharded = sharded.lines().filter(|channel| !channel.starts_with("ERR"));
    let channels = channels.lines().chain(sharded);
    let channels =
        channels.filter(|channel| !channel.is_empty() && *channel != "__sentinel__:hello");
    keys.chain(clients).chain(channels).map(str::to_owned).collect()
}

impl RedisServer {
    /// Waits until clients that are gone have left nothing behind: no key, no
    /// connection, no subscription. Returns what is still there after this time.
    pub async fn left_after(&self, within: Duration) -> Vec<String> {
        let began = Instant::now();
        loop {
            let left = left(self);
            if left.is_empty() || began.elapsed() >= within {
                return left;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Checks invariant I3 at this server: clients that are gone leave nothing behind.
    ///
    /// # Panics
    /// If something is left after 20 s, which is far more than any ttl in the tests.
    pub async fn assert_nothing_left(&self) {
        let left = self.left_after(Duration::from_secs(20)).await;
        assert!(left.is_empty(), "left behind: {left:#?}");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("the log of the server is kept in {}", self.directory.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

fn runs(program: &str) -> bool {
    let version = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}
