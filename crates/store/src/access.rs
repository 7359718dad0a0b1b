//! A store and the right to use it, from what the environment says.

use crate::environment::Environment;
use crate::failure::credentials_of;
use crate::name::{StoreKind, StoreName};
use crate::profiles::Profile;
use crate::transport::Connector;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::signer::Signer;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::time::Duration;
use zebu_remote::RemoteError;
use zebu_remote::http::HttpOptions;

/// A bucket of a store, with credentials.
#[derive(Debug)]
pub(crate) enum Access {
    S3(AmazonS3),
    Gs(GoogleCloudStorage),
    /// An emulator of Google's store, which asks for no credentials: the URL of the bucket.
    GsEmulator(GoogleCloudStorage, String),
    Az(MicrosoftAzure),
}

/// A choice of variables, and what each is called in `object_store`.
const OF_S3: [(&str, AmazonS3ConfigKey); 10] = [
    ("AWS_REGION", AmazonS3ConfigKey::Region),
    ("AWS_DEFAULT_REGION", AmazonS3ConfigKey::DefaultRegion),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_ENDPOINT_URL_STS", AmazonS3ConfigKey::StsEndpoint),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
    ("AWS_EC2_METADATA_SERVICE_ENDPOINT", AmazonS3ConfigKey::MetadataEndpoint),
    ("AWS_REQUEST_PAYER", AmazonS3ConfigKey::RequestPayer),
    ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", AmazonS3ConfigKey::VirtualHostedStyleRequest),
];

/// Few tries: whoever asks has a patience of its own.
fn retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(2),
            base: 2.,
        },
        max_retries: 3,
        retry_timeout: Duration::from_secs(30),
    }
}

impl Access {
    /// The bucket of `name`.
    ///
    /// # Errors
    /// The environment or a profile says what can't be used, or there are no credentials.
    pub(crate) fn new(
        name: &StoreName,
        options: &HttpOptions,
        environment: Environment<'_>,
    ) -> Result<Self, RemoteError> {
        let connector = Connector(options.clone());
        let made = match name.kind() {
            StoreKind::S3 => s3(name.bucket(), connector, environment),
            StoreKind::Gs => gs(name.bucket(), connector, environment),
            StoreKind::Az => az(name.bucket(), connector, environment),
        };
        made.map_err(|reason| RemoteError::new(&name.to_string(), libc::EINVAL, reason))
    }

    pub(crate) fn signer(&self) -> &dyn Signer {
        match self {
            Self::S3(store) => store,
            Self::Gs(store) | Self::GsEmulator(store, _) => store,
            Self::Az(store) => store,
        }
    }

    pub(crate) fn multipart(&self) -> &dyn MultipartStore {
        match self {
            Self::S3(store) => store,
            Self::Gs(store) | Self::GsEmulator(store, _) => store,
            Self::Az(store) => store,
        }
    }

    pub(crate) fn objects(&self) -> &dyn ObjectStore {
        match self {
            Self::S3(store) => store,
            Self::Gs(store) | Self::GsEmulator(store, _) => store,
            Self::Az(store) => store,
        }
    }
}

fn missing(kind: StoreKind) -> String {
    format!("there are no credentials: {}", credentials_of(kind))
}

fn is_plain(url: &str) -> bool {
    url.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http://"))
}

/// Checks an endpoint, so that its errors name where it stands.
fn endpoint(url: String, place: &str) -> Result<String, String> {
    let parsed = zebu_remote::http::HttpUrl::parse(&url).map_err(|reason| format!("{place}: {reason}"))?;
    if parsed.has_credentials() {
        return Err(format!("{place}: no user belongs into the URL of an endpoint"));
    }
    // The bucket and the key would stand behind it, and be no path any more.
    if url.contains('?') {
        return Err(format!("{place}: no query belongs into the URL of an endpoint"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

fn s3(bucket: &str, connector: Connector, environment: Environment<'_>) -> Result<Access, String> {
    let profile = Profile::read(environment)?;
    let mut builder = AmazonS3Builder::new().with_bucket_name(bucket).with_retry(retries());
    for (variable, key) in OF_S3 {
        if let Some(value) = environment.get(variable) {
            builder = builder.with_config(key, value);
        }
    }
    if environment.get("AWS_REGION").or_else(|| environment.get("AWS_DEFAULT_REGION")).is_none()
        && let Some(region) = &profile.region
    {
        builder = builder.with_region(region);
    }
    let given = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]
        .into_iter()
        .find_map(|variable| environment.get(variable).map(|url| (url, variable)));
    let given =
        given.or_else(|| profile.endpoint_url.clone().map(|url| (url, "endpoint_url of the profile")));
    let mut client = ClientOptions::new();
    if let Some((url, place)) = given {
        let url = endpoint(url, place)?;
        client = client.with_allow_http(is_plain(&url));
        builder = builder.with_endpoint(url);
    } else if !bucket.contains('.') && bucket.len() < 64 {
        // Certificates of AWS have no names with more dots.
        builder = builder.with_virtual_hosted_style_request(true);
    }
    builder = builder.with_client_options(client).with_http_connector(connector);

    let key = environment.get("AWS_ACCESS_KEY_ID");
    let secret = environment.get("AWS_SECRET_ACCESS_KEY");
    let role = |profile: &Profile| profile.web_identity_token_file.clone().zip(profile.role_arn.clone());
    let of_environment = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE").zip(environment.get("AWS_ROLE_ARN"));
    match (key, secret) {
        (Some(key), Some(secret)) => {
            builder = builder.with_access_key_id(key).with_secret_access_key(secret);
            if let Some(token) = environment.get("AWS_SESSION_TOKEN") {
                builder = builder.with_token(token);
            }
        }
        (Some(_), None) => {
            return Err("AWS_ACCESS_KEY_ID is given, and AWS_SECRET_ACCESS_KEY is not".to_owned());
        }
        (None, Some(_)) => {
            return Err("AWS_SECRET_ACCESS_KEY is given, and AWS_ACCESS_KEY_ID is not".to_owned());
        }
        (None, None) => {
            if let Some((file, role)) = of_environment {
                builder = builder
                    .with_config(AmazonS3ConfigKey::WebIdentityTokenFile, file)
                    .with_config(AmazonS3ConfigKey::RoleArn, role);
            } else if let Some(key) = &profile.access_key_id {
                let secret = profile
                    .secret_access_key
                    .as_ref()
                    .ok_or("the profile has aws_access_key_id without aws_secret_access_key")?;
                builder = builder.with_access_key_id(key).with_secret_access_key(secret);
                if let Some(token) = &profile.session_token {
                    builder = builder.with_token(token);
                }
            } else if let Some((file, role)) = role(&profile) {
                builder = builder
                    .with_config(AmazonS3ConfigKey::WebIdentityTokenFile, file)
                    .with_config(AmazonS3ConfigKey::RoleArn, role);
                if let Some(session) = &profile.role_session_name {
                    builder = builder.with_config(AmazonS3ConfigKey::RoleSessionName, session);
                }
            } else if environment
                .get("AWS_EC2_METADATA_DISABLED")
                .is_some_and(|value| value.eq_ignore_ascii_case("true"))
                && environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").is_none()
                && environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI").is_none()
            {
                return Err(missing(StoreKind::S3));
            }
        }
    }
    builder.build().map(Access::S3).map_err(|error| error.to_string())
}

fn gs(bucket: &str, connector: Connector, environment: Environment<'_>) -> Result<Access, String> {
    let mut builder = GoogleCloudStorageBuilder::new().with_bucket_name(bucket).with_retry(retries());
    for (variable, key) in [
        ("GOOGLE_SERVICE_ACCOUNT", GoogleConfigKey::ServiceAccount),
        ("GOOGLE_SERVICE_ACCOUNT_PATH", GoogleConfigKey::ServiceAccount),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", GoogleConfigKey::ServiceAccountKey),
        ("GOOGLE_APPLICATION_CREDENTIALS", GoogleConfigKey::ApplicationCredentials),
    ] {
        if let Some(value) = environment.get(variable) {
            builder = builder.with_config(key, value);
        }
    }
    let emulator = environment.get("STORAGE_EMULATOR_HOST");
    let mut client = ClientOptions::new();
    let mut place = None;
    if let Some(host) = emulator {
        let url = if host.contains("://") { host } else { format!("http://{host}") };
        let url = endpoint(url, "STORAGE_EMULATOR_HOST")?;
        client = client.with_allow_http(is_plain(&url));
        builder = builder.with_base_url(&url).with_config(GoogleConfigKey::BearerToken, "none");
        place = Some(format!("{url}/{bucket}"));
    }
    let store = builder.with_client_options(client).with_http_connector(connector).build();
    let store = store.map_err(|error| error.to_string())?;
    Ok(match place {
        Some(place) => Access::GsEmulator(store, place),
        None => Access::Gs(store),
    })
}

fn az(container: &str, connector: Connector, environment: Environment<'_>) -> Result<Access, String> {
    let mut builder = MicrosoftAzureBuilder::new().with_container_name(container).with_retry(retries());
    let mut plain = false;
    if let Some(text) = environment.get("AZURE_STORAGE_CONNECTION_STRING") {
        for (key, value) in text.split(';').filter_map(|pair| pair.split_once('=')) {
            builder = match key.trim() {
                "AccountName" => builder.with_account(value),
                "AccountKey" => builder.with_access_key(value),
                "BlobEndpoint" => {
                    let url = endpoint(value.to_owned(), "BlobEndpoint of AZURE_STORAGE_CONNECTION_STRING")?;
                    plain |= is_plain(&url);
                    builder.with_endpoint(url)
                }
                "SharedAccessSignature" => {
                    return Err("AZURE_STORAGE_CONNECTION_STRING: SharedAccessSignature is not supported; AccountKey is".to_owned());
                }
                _ => builder,
            };
        }
    }
    for (variable, key) in [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_ACCOUNT_NAME", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("AZURE_STORAGE_ACCOUNT_KEY", AzureConfigKey::AccessKey),
        ("AZURE_CLIENT_ID", AzureConfigKey::ClientId),
        ("AZURE_CLIENT_SECRET", AzureConfigKey::ClientSecret),
        ("AZURE_TENANT_ID", AzureConfigKey::AuthorityId),
        ("AZURE_FEDERATED_TOKEN_FILE", AzureConfigKey::FederatedTokenFile),
        ("AZURE_STORAGE_ENDPOINT", AzureConfigKey::Endpoint),
    ] {
        let Some(value) = environment.get(variable) else { continue };
        let value = match key {
            AzureConfigKey::Endpoint => {
                let url = endpoint(value, variable)?;
                plain |= is_plain(&url);
                url
            }
            _ => value,
        };
        builder = builder.with_config(key, value);
    }
    if builder.get_config_value(&AzureConfigKey::AccountName).is_none() {
        return Err(missing(StoreKind::Az));
    }
    let client = ClientOptions::new().with_config(ClientConfigKey::AllowHttp, plain.to_string());
    let store = builder.with_client_options(client).with_http_connector(connector).build();
    store.map(Access::Az).map_err(|error| error.to_string())
}
