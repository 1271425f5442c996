//! Certificates for servers that are reached by TLS.

/// Certificates of a server and a client, signed by an authority of the test: `ca.pem`,
/// `server.pem` with `server.key`, `client.pem` with `client.key`.
pub(crate) struct Certificates {
    directory: tempfile::TempDir,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut of_authority = rcgen::CertificateParams::new(vec![]).expect("parameters");
        of_authority.distinguished_name.push(rcgen::DnType::CommonName, "authority");
        of_authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = of_authority.self_signed(&key).expect("an authority");
        let certificates = Certificates { directory };
        certificates.write("ca.pem", &authority.pem());
        let issuer = rcgen::Issuer::new(of_authority, key);
        for name in ["server", "client"] {
            let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
            let mut parameters = rcgen::CertificateParams::new(names).expect("parameters");
            parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
            let key = rcgen::KeyPair::generate().expect("a key");
            let signed = parameters.signed_by(&key, &issuer).expect("a certificate");
            certificates.write(&format!("{name}.pem"), &signed.pem());
            certificates.write(&format!("{name}.key"), &key.serialize_pem());
        }
        certificates
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.directory.path().join(name), text).expect("a file");
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }
}
