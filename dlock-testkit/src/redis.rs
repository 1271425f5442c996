//! Real Redis servers, started by the tests that need them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock_core::backend::redis::Redis;

/// A `redis-server` process on a free loopback port, without persistence; killed
/// when dropped.
#[derive(Debug)]
pub struct RedisServer {
    process: Option<Child>,
    port: u16,
    directory: PathBuf,
    options: Vec<String>,
}

impl RedisServer {
    /// A server, or `None` if `redis-server` is missing; see
    /// [`found`](crate::servers::found).
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// The same with more options, as on its command line.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn with(options: &[&str]) -> Option<Self> {
        let version = Command::new("redis-server").arg("--version").stdout(Stdio::null()).status();
        if !crate::servers::found("redis-server", version.is_ok_and(|status| status.success())) {
            return None;
        }
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("dlock-redis-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).expect("a directory for the server");
        let options = options.iter().map(|&option| option.to_owned()).collect();
        // Between finding a free port and its use another process may take it.
        for _ in 0..10 {
            let port = free_port();
            let mut server = RedisServer {
                process: None,
                port,
                directory: directory.clone(),
                options: Vec::clone(&options),
            };
            if server.launch() {
                return Some(server);
            }
            server.directory = PathBuf::new(); // goes on to the next attempt
        }
        panic!("redis-server does not start; its log is in {}", directory.display());
    }

    fn launch(&mut self) -> bool {
        let log = self.directory.join("log");
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .arg("--dir")
            .arg(&self.directory)
            .arg("--logfile")
            .arg(&log)
            .arg("--unixsocket")
            .arg(self.socket())
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server can be run");
        self.process = Some(process);
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            let gone = self.process.as_mut().is_some_and(|it| !matches!(it.try_wait(), Ok(None)));
            if gone {
                return false;
            }
            if TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// Kills it with SIGKILL: what it had in memory is gone.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it again on the same port.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn restart(&mut self) {
        self.kill();
        let began = Instant::now();
        while !self.launch() {
            assert!(began.elapsed() < Duration::from_secs(20), "redis-server does not restart");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// A backend on it, for one client.
    ///
    /// # Panics
    /// Never: the URL is right.
    pub fn backend(&self) -> Redis {
        Redis::new(&self.url(), "test").expect("a URL")
    }

    /// Runs `redis-cli` with these arguments.
    ///
    /// # Panics
    /// If it cannot be run.
    pub fn cli(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-p", &self.port.to_string()])
            .args(arguments)
            .output()
            .expect("redis-cli comes with redis-server");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        if self.directory != Path::new("") {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
