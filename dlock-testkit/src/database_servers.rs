//! Real PostgreSQL, PgBouncer, MariaDB and MySQL servers, started by the tests that need them: in
//! a temporary directory, on a free loopback port, ended by their own process ids.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::server_process::{START, Server, server};

const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// A PostgreSQL server with the user and database `dlock`, without passwords. It is killed
/// when this value is dropped.
#[derive(Debug)]
pub struct PostgresServer(Server);

server!(PostgresServer);

impl PostgresServer {
    /// Starts a server; `None` if PostgreSQL is not installed, see
    /// [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// Starts a server with more settings, such as `max_connections=10`.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with(settings: &[&str]) -> Option<Self> {
        let programs = postgres_programs();
        crate::servers::found("PostgreSQL", programs.is_some()).then_some(())?;
        let programs = programs?;
        let mut server = Server::new("postgres");
        give_to(server.directory(), "postgres");
        let data = server.path("data");
        let initdb = programs.join("initdb").display().to_string();
        run(&as_user("postgres", &[&initdb, "-D", &data, "-A", "trust", "-U", "dlock", "-N"]));
        let (port, sockets) = (server.port.to_string(), server.path(""));
        let program = programs.join("postgres").display().to_string();
        let mut command =
            as_user("postgres", &[&program, "-D", &data, "-p", &port, "-k", &sockets]);
        for setting in ["listen_addresses=127.0.0.1"].iter().chain(settings) {
            command.extend(["-c".to_owned(), (*setting).to_owned()]);
        }
        server.command = command;
        server.launch();
        let server = PostgresServer(server);
        server.wait_until_ready();
        server.sql_in("postgres", "CREATE DATABASE dlock");
        Some(server)
    }

    pub(crate) fn wait_until_ready(&self) {
        let began = Instant::now();
        while self.psql("postgres", "SELECT 1").is_err() {
            assert!(began.elapsed() < START, "PostgreSQL does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts a server whose wall clock a test sets with libfaketime; `None` if one of them
    /// is not installed.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with_clock() -> Option<(Self, ServerClock)> {
        crate::servers::found("libfaketime", Path::new(FAKETIME).exists()).then_some(())?;
        let mut server = Self::start()?;
        let clock = ServerClock { file: server.0.directory().join("clock") };
        clock.set(0);
        // Set by `env`, since the library must not be loaded before the user is switched.
        let file = clock.file.display();
        let variables = [
            "env".to_owned(),
            format!("LD_PRELOAD={FAKETIME}"),
            format!("FAKETIME_TIMESTAMP_FILE={file}"),
            "FAKETIME_NO_CACHE=1".to_owned(),
            "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
        ];
        let command = &mut server.0.command;
        let program = command.iter().position(|word| word == "--").map_or(0, |place| place + 1);
        command.splice(program..program, variables);
        server.0.restart();
        server.wait_until_ready();
        Some((server, clock))
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        format!("postgres://dlock@127.0.0.1:{}/dlock", self.0.port)
    }

    /// Runs SQL as the owner of the server and returns what it prints: one line for each
    /// row, columns separated by `|`.
    ///
    /// # Panics
    /// If the statement fails.
    pub fn sql(&self, statement: &str) -> String {
        self.sql_in("dlock", statement)
    }

    fn sql_in(&self, database: &str, statement: &str) -> String {
        self.psql(database, statement).unwrap_or_else(|error| panic!("{statement}: {error}"))
    }

    fn psql(&self, database: &str, statement: &str) -> Result<String, String> {
        let port = self.0.port.to_string();
        let mut psql = Command::new("psql");
        psql.args(["-h", "127.0.0.1", "-p", &port, "-U", "dlock", "-d", database]).args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            statement,
        ]);
        printed(&mut psql)
    }
}

/// The wall clock of a server, which a test sets with libfaketime.
#[derive(Debug)]
pub struct ServerClock {
    file: PathBuf,
}

impl ServerClock {
    /// Sets the clock this many seconds ahead of the real time, or behind it.
    ///
    /// # Panics
    /// If the clock cannot be set.
    pub fn set(&self, seconds: i64) {
        std::fs::write(&self.file, format!("{seconds:+}")).expect("the clock is set");
    }
}

/// A PgBouncer in front of a PostgreSQL server, which pools transactions. It is killed when
/// this value is dropped.
#[derive(Debug)]
pub struct PgBouncer(Server);

server!(PgBouncer);

impl PgBouncer {
    /// Starts a pooler; `None` if PgBouncer is not installed, see
    /// [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the pooler does not start.
    pub fn start(of: &PostgresServer) -> Option<Self> {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"];
        let program = program.into_iter().find(|path| Path::new(path).exists());
        crate::servers::found("PgBouncer", program.is_some()).then_some(())?;
        let mut server = Server::new("pgbouncer");
        let (port, users, ini) = (server.port, server.path("users"), server.path("ini"));
        std::fs::write(&users, "\"dlock\" \"\"\n").expect("the users");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\nauth_file = {users}\n\
             pool_mode = transaction\nmax_client_conn = 500\ndefault_pool_size = 5\n\
             ignore_startup_parameters = extra_float_digits\n",
            of.port()
        );
        // Everybody is the same user: `any` needs one.
        let settings = settings.replace("port=", "user=dlock port=");
        std::fs::write(&ini, settings).expect("the settings");
        give_to(server.directory(), "postgres");
        server.command = as_user("postgres", &[program?, &ini]);
        server.launch();
        Some(PgBouncer(server))
    }

    /// The URL of the database behind the pooler.
    pub fn url(&self) -> String {
        format!("postgres://dlock@127.0.0.1:{}/dlock", self.0.port)
    }
}

/// A MariaDB server with the database `dlock` and the user `root`, without a password. It
/// is killed when this value is dropped.
#[derive(Debug)]
pub struct MariaDbServer(Server);

server!(MariaDbServer);

impl MariaDbServer {
    /// Starts a server; `None` if MariaDB is not installed, see
    /// [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// Starts a server with more options, such as `--max-connections=10`.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with(options: &[&str]) -> Option<Self> {
        let program = ["/usr/sbin/mariadbd", "/usr/bin/mariadbd"];
        let program = program.into_iter().find(|path| Path::new(path).exists());
        crate::servers::found("MariaDB", program.is_some()).then_some(())?;
        let mut server = Server::new("mariadb");
        let data = format!("--datadir={}", server.path("data"));
        // Servers that start at the same time would remove each other's temporary tables.
        std::fs::create_dir_all(server.path("tmp")).expect("a directory");
        let tmp = format!("--tmpdir={}", server.path("tmp"));
        let user = user_option();
        run(&[
            "mariadb-install-db".to_owned(),
            "--no-defaults".to_owned(),
            data.clone(),
            tmp.clone(),
            "--auth-root-authentication-method=normal".to_owned(),
            "--skip-test-db".to_owned(),
            user.clone(),
        ]);
        let command = [
            program?.to_owned(),
            "--no-defaults".to_owned(),
            user,
            data,
            tmp,
            format!("--port={}", server.port),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--socket={}", server.path("s")),
            format!("--pid-file={}", server.path("p")),
        ];
        server.command = command.into_iter().chain(options.iter().map(|it| (*it).into())).collect();
        server.launch();
        let server = MariaDbServer(server);
        server.wait_for("CREATE DATABASE IF NOT EXISTS dlock");
        Some(server)
    }

    pub(crate) fn wait_until_ready(&self) {
        self.wait_for("SELECT 1");
    }

    /// Waits until a statement works: a node of a cluster accepts none while it joins.
    fn wait_for(&self, statement: &str) {
        let began = Instant::now();
        while let Err(error) = self.mariadb(statement) {
            assert!(began.elapsed() < START, "MariaDB does not answer: {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/dlock", self.0.port)
    }

    /// Runs SQL as root and returns what it prints: one line for each row, columns
    /// separated by tabs.
    ///
    /// # Panics
    /// If the statement fails.
    pub fn sql(&self, statement: &str) -> String {
        self.mariadb(statement).unwrap_or_else(|error| panic!("{statement}: {error}"))
    }

    pub(crate) fn mariadb(&self, statement: &str) -> Result<String, String> {
        mariadb(self.0.port, statement)
    }
}

/// A MySQL 8 server with the database `dlock` and the user `root`, without a password. It is
/// killed when this value is dropped.
#[derive(Debug)]
pub struct MySqlServer(Server);

server!(MySqlServer);

impl MySqlServer {
    /// Starts a server; `None` if MySQL was not fetched, see
    /// [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// Starts a server with more options, such as `--max-connections=10`.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with(options: &[&str]) -> Option<Self> {
        let base = crate::servers::cache().join("mysql-8.0");
        let program = base.join("bin/mysqld");
        let is_there = program.exists() && Path::new("/usr/bin/mariadb").exists();
        crate::servers::found("MySQL 8, or the client of MariaDB", is_there).then_some(())?;
        let mut server = Server::new("mysql");
        std::fs::create_dir_all(server.path("tmp")).expect("a directory");
        let mut command = vec![
            program.display().to_string(),
            "--no-defaults".to_owned(),
            user_option(),
            format!("--datadir={}", server.path("data")),
            format!("--basedir={}", base.display()),
            format!("--tmpdir={}", server.path("tmp")),
        ];
        run(&[&command[..], &["--initialize-insecure".to_owned()]].concat());
        command.extend([
            format!("--port={}", server.port),
            "--bind-address=127.0.0.1".to_owned(),
            "--mysqlx=OFF".to_owned(),
            format!("--socket={}", server.path("s")),
            format!("--pid-file={}", server.path("p")),
        ]);
        command.extend(options.iter().map(|&option| option.to_owned()));
        server.command = command;
        server.launch();
        let server = MySqlServer(server);
        let began = Instant::now();
        while mariadb(server.port(), "CREATE DATABASE IF NOT EXISTS dlock").is_err() {
            assert!(began.elapsed() < START, "MySQL does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(server)
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/dlock", self.0.port)
    }

    /// Runs SQL as root and returns what it prints: one line for each row, columns
    /// separated by tabs.
    ///
    /// # Panics
    /// If the statement fails.
    pub fn sql(&self, statement: &str) -> String {
        mariadb(self.0.port, statement).unwrap_or_else(|error| panic!("{statement}: {error}"))
    }
}

/// Runs SQL as root with the client of MariaDB.
fn mariadb(port: u16, statement: &str) -> Result<String, String> {
    let mut mariadb = Command::new("mariadb");
    mariadb.args(["--no-defaults", "--protocol=tcp", "-h", "127.0.0.1", "-u", "root"]).args([
        "-P",
        &port.to_string(),
        "-B",
        "-N",
        "-e",
        statement,
    ]);
    printed(&mut mariadb)
}

/// What a program prints, or why it failed.
fn printed(program: &mut Command) -> Result<String, String> {
    let output = program.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Where the programs of the newest PostgreSQL are, or of that in `DLOCK_TEST_POSTGRES`.
fn postgres_programs() -> Option<PathBuf> {
    if let Some(programs) = std::env::var_os("DLOCK_TEST_POSTGRES") {
        return Some(PathBuf::from(programs));
    }
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let programs = versions.filter_map(|version| Some(version.ok()?.path().join("bin")));
    programs.filter(|path| path.join("initdb").exists() && path.join("postgres").exists()).max()
}

/// A command that runs as this user: the servers refuse to run as root.
fn as_user(user: &str, command: &[&str]) -> Vec<String> {
    let mut line = Vec::new();
    if rustix::process::getuid().is_root() {
        let switch = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"];
        line.extend(switch.map(str::to_owned));
    }
    line.extend(command.iter().map(|&word| word.to_owned()));
    line
}

fn give_to(directory: &Path, user: &str) {
    if rustix::process::getuid().is_root() {
        let path = directory.to_str().expect("a path");
        run(&["chown".to_owned(), "-R".to_owned(), user.to_owned(), path.to_owned()]);
    }
}

/// MariaDB runs as root only when it is told to.
fn user_option() -> String {
    let name = rustix::process::getuid().is_root().then_some("root");
    format!("--user={}", name.unwrap_or("mysql"))
}

fn run(command: &[String]) {
    let output = Command::new(&command[0])
        .args(&command[1..])
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", command[0]));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
}
