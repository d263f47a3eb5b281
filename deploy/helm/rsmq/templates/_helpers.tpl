{{/* What every pod has in common: its account, rights, secrets for its image, and where it may run. */}}
{{- define "rsmq.pod" -}}
automountServiceAccountToken: false
{{- with include "rsmq.account" . }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "rsmq.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ .Release.Name }}{{ end }}
{{- end }}

{{/* Its replicas on different machines. Takes the root and the name of the Deployment. */}}
{{- define "rsmq.spread" -}}
{{- if .root.Values.topologySpread }}
topologySpreadConstraints:
{{- range .root.Values.topologySpread }}
  - {{ toJson (merge (dict "labelSelector" (dict "matchLabels" (dict "app" $.name))) .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "rsmq.scraped" -}}
{{- if not .root.Values.serviceMonitor.enabled }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
{{- end }}
{{- end }}

{{- define "rsmq.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{ .Values.securityContext | toJson }}
{{- end }}

{{/* The address of the server, and the settings. */}}
{{- define "rsmq.env" -}}
- name: RSMQ_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.url.secret }}, key: {{ .Values.url.key }}}}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* What a pod with the application's own code gets: also what that code needs. It answers probes at 9100. */}}
{{- define "rsmq.app" -}}
env:
{{ include "rsmq.env" . | indent 2 }}
  - {name: RSMQ_METRICS, value: "0.0.0.0:9100"}
{{- range .Values.env }}
  - {{ toJson . }}
{{- end }}
{{- with .Values.envFrom }}
envFrom: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "rsmq.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* The pods that answer probes and metrics at 9100, as JSON. */}}
{{- define "rsmq.apps" -}}
{{- $names := list }}
{{- range $name, $_ := .Values.workers }}{{ $names = append $names (printf "%s-%s" $.Release.Name $name) }}{{ end }}
{{- if .Values.gateway.enabled }}{{ $names = append $names (printf "%s-gateway" .Release.Name) }}{{ end }}
{{- toJson $names }}
{{- end }}

{{/* A rule for scrapes: from everywhere, or from some namespaces. */}}
{{- define "rsmq.from" -}}
{{- if .Values.networkPolicy.metricsFrom }}
from:
{{- range .Values.networkPolicy.metricsFrom }}
  - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . }}}}
{{- end }}
{{- end }}
{{- end }}
